"""What a model card says of a run, as plain values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from callbacks.image_writer import save_png
from callbacks.report.figures import metric_names
from callbacks.report.page import Strip, read_strip, sample_files, shareable, write_grid
from callbacks.run_folder import RunFolder
from lightning_modules.edit_module import EditModule

GRID = "samples.png"
# Samples that a card shows.
MOST = 4


def settings_rows(run: RunFolder, module: EditModule, processes: int) -> list[tuple[str, Any]]:
    """How it was trained: the name and the value of each setting that it has."""
    assert module.adapter is not None
    config: Any = OmegaConf.load(run.config) if run.config.is_file() else OmegaConf.create()

    def setting(key: str) -> Any:
        return shareable(OmegaConf.select(config, key))

    adapter, optimizer = module.adapter.metadata(), setting("optimizer._target_")
    batch = (setting("data.batch_size") or 1) * (setting("trainer.accumulate_grad_batches") or 1) * processes
    tokens = setting("data.max_tokens_per_batch")
    rows = {
        "optimizer": None if optimizer is None else str(optimizer).rpartition(".")[2],
        "learning rate": setting("optimizer.lr"),
        "samples a step": f"up to {tokens} tokens" if tokens else batch,
        "rank": adapter.get("rank"),
        "alpha": adapter.get("alpha"),
        "resolution": setting("data.resolution") or module.geometry.resolution,
        "dtype of the base": str(module.base.dtype).removeprefix("torch."),
        "its linear layers": module.base.source.precision,
        "seed": setting("seed"),
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def metric_rows(first: Mapping[str, float], now: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Of two rows of validation.csv: the name of each metric, then, now, and what doing nothing scores."""

    def figure(row: Mapping[str, float], name: str) -> str:
        return f"{row[name]:.4g}" if name in row else ""

    names = {"validation loss": "val_loss", **{name: name for name in metric_names(now)}}
    return [
        (title, figure(first, name), figure(now, name), figure(now, f"{name}_nothing")) for title, name in names.items()
    ]


def write_pictures(run: RunFolder, folder: Path, step: int) -> tuple[int, list[Strip]]:
    """GRID and the results alone beside the weights of a step; the step of these pictures, and the samples.

    There are none where there are no sample pictures both of the base and of later.
    """
    if not write_grid(run, folder / GRID, step, MOST):
        return 0, []
    samples = {at: files for at, files in sample_files(run).items() if at <= step}
    strips = [read_strip(path) for path in list(samples[max(samples)].values())[:MOST]]
    for number, strip in enumerate(strips, start=1):
        save_png(strip.result, folder / result_name(number))
    return max(samples), strips


def result_name(number: int) -> str:
    """The file of a sample's result."""
    return f"sample-{number}.png"


def is_outdated(folder: Path) -> bool:
    """Whether a folder of weights has no README.md, or an older one; not of a folder without weights."""
    weights = [path for path in folder.rglob("[!.]*") if path.is_file() and not _is_of_card(path)]
    card = folder / "README.md"
    return bool(weights) and (not card.is_file() or card.stat().st_mtime_ns < newest(weights))


def newest(paths: Sequence[Path]) -> int:
    """When the last of these files was written, in ns."""
    return max(path.stat().st_mtime_ns for path in paths)


def _is_of_card(path: Path) -> bool:
    return path.name == "README.md" or path.suffix == ".png"
