"""Defaults of large models on Shapes, former and present: timestep shift, layers and schedule, on three edits."""

from pathlib import Path

from benchmarks.shapes_runs import Rows, run, table
from datamodules.images.shapes import write_pairs
from datamodules.images.tables import TABLES
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.layers import ATTENTION
from report.tables import read_rows

EDITS = ("segment", "invert", "mirror")
PAIRS, HELD_OUT = 24, 16


def _layers(names: tuple[str, ...]) -> str:
    return f"adapter.target_modules=[{','.join(names)}]"


FORMER = [_layers(ATTENTION), "scheduler=cosine"]
LAYERS = _layers(FluxKontext.layers.targets)
PRESENT = [LAYERS, "scheduler=constant", "model.timesteps.shift=dynamic"]
CHOICES = {
    "former": FORMER,
    "layers": [LAYERS, "scheduler=cosine"],
    "shift dynamic": [*FORMER, "model.timesteps.shift=dynamic"],
    "schedule constant": [_layers(ATTENTION), "scheduler=constant"],
    "all three": PRESENT,
    "all three, a third of the rate": [*PRESENT, "optimizer.lr=1.5e-3"],
    "all three, three times the rate": [*PRESENT, "optimizer.lr=1.5e-2"],
    "all three, ten times the rate": [*PRESENT, "optimizer.lr=5e-2"],
}


def recipes(pairs: Path, steps: int, seeds: range, pictures: Path | None) -> None:
    """PSNR and validation loss of each choice, edit by edit."""

    def measured(folder: Path, seed: int, overrides: list[str]) -> dict[str, float]:
        output, _ = run(folder, steps, f"seed={seed}", "sample_every=30", *overrides)
        rows = read_rows(output / "validation.csv")
        by_step = {f"PSNR at {row['step']:.0f}": row["psnr"] for row in rows[1:]}
        return {**by_step, "val_loss": rows[-1]["val_loss"]}

    for edit in EDITS:
        folder = pairs / edit
        folder.mkdir()
        write_pairs(folder, [edit], PAIRS + HELD_OUT, seed=0, change_weight=1)
        lines = (folder / TABLES[0]).read_text().splitlines()
        (folder / "train-24.jsonl").write_text("\n".join(lines[:PAIRS]))
        (folder / "held_out.jsonl").write_text("\n".join(lines[PAIRS:]))

        def rows(folder: Path = folder) -> Rows:
            for label, overrides in CHOICES.items():
                yield label, [measured(folder, seed, overrides) for seed in seeds]

        table(edit, rows())
