"""Compare averages of weights, and adapters of equal size, on Shapes."""

from pathlib import Path

import torch

from benchmarks.shapes_runs import Rows, command, run, table
from report.tables import read_validation

AVERAGES = {"cosine": [], "constant": ["scheduler=constant"]}
HALF_LIVES = (100, 400)  # samples; a step has 16


def averages(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Compare the last weights with an EMA in training and with averages of saved files."""

    def measured(seed: int, weights: Path) -> dict[str, float]:
        output, _ = run(pairs, 1, f"seed={seed}", f"adapter.init_from={weights}")
        row = read_validation(output / "validation.csv")[0]
        return {"mask IoU": row["mask_iou"], "PSNR, dB": row["psnr"], "val_loss": row["val_loss"]}

    def rows() -> Rows:
        for name, overrides in AVERAGES.items():
            kept = {
                half_life: [
                    run(pairs, steps, f"seed={seed}", *overrides, f"ema.half_life={half_life}", "save_every=10")[0]
                    for seed in seeds
                ]
                for half_life in HALF_LIVES
            }
            raw = kept[HALF_LIVES[0]]
            weights = {"last": [output / "lora" / "last-raw" for output in raw]}
            weights |= {
                f"EMA, half-life {half_life}": [output / "lora" / "last" for output in outputs]
                for half_life, outputs in kept.items()
            }
            for std in (0.05, 0.1, 0.2):
                weights[f"post-hoc, {std}"] = []
                for output in raw:
                    made = output.parent / f"average-{std}"
                    average = ["task=average", f"lora={output}", f"average.relative_std={std}", f"output_dir={made}"]
                    command(pairs, "predict.py", *average)
                    weights[f"post-hoc, {std}"].append(made)
            for label, folders in weights.items():
                yield f"{name}: {label}", [measured(*one) for one in zip(seeds, folders, strict=True)]

    table("averages", rows())


# In two groups, of about 410 and 150 thousand parameters.
ADAPTERS: dict[str, list[str]] = {
    "lora, rank 16": [],
    "dora, rank 16": ["adapter=dora"],
    "loha, rank 8": ["adapter=loha"],
    "lokr, factor 2, rank 32": ["adapter=lokr", "adapter.decompose_factor=2", "adapter.rank=32"],
    "lora_plus_ratio=4": ["adapter.lora_plus_ratio=4"],
    "lora, rank 6": ["adapter.rank=6"],
    "lokr, factor 4, full_matrix": ["adapter=lokr", "adapter.decompose_factor=4", "adapter.full_matrix=true"],
    "oft, blocks of 32": ["adapter=oft"],
}
# Each adapter gets its best one with the first seed.
LEARNING_RATES = ("1.5e-3", "5e-3", "1.5e-2")


def adapters(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Compare adapters with about the same number of parameters on one edit."""

    def loss(seed: int, lr: str, overrides: list[str]) -> float:
        output, _ = run(pairs, steps, f"seed={seed}", *overrides, f"optimizer.lr={lr}")
        return read_validation(output / "validation.csv")[-1]["val_loss"]

    def rows() -> Rows:
        for label, overrides in ADAPTERS.items():
            measured = []
            lr = min(LEARNING_RATES, key=lambda one, more=overrides: loss(seeds[0], one, more))  # type: ignore[misc]
            for seed in seeds:
                output, seconds = run(pairs, steps, f"seed={seed}", *overrides, f"optimizer.lr={lr}")
                last = read_validation(output / "validation.csv")[-1]
                checkpoint = torch.load(output / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
                measured.append(
                    {
                        "lr": float(lr),
                        "parameters": sum(tensor.numel() for tensor in checkpoint["state_dict"].values()),
                        "mask IoU": last["mask_iou"],
                        "PSNR, dB": last["psnr"],
                        "val_loss": last["val_loss"],
                        "seconds": seconds,
                    }
                )
            yield label, measured

    table("adapters", rows())
