"""Section on adapters of equal size, each with its best learning rate."""

from collections.abc import Sequence

import torch

from benchmarks.shapes.runs import Figures, Section, draw_pairs, last_row, train

# In two groups, of about 410 and 150 thousand parameters.
ADAPTERS = {
    "lora, rank 16": ["adapter=lora"],
    "lora, rank 16, `lora_plus_ratio=4`": ["adapter.lora_plus_ratio=4"],
    "dora, rank 16": ["adapter=dora"],
    "loha, rank 8": ["adapter=loha"],
    "lokr, factor 2, rank 32": ["adapter=lokr", "adapter.decompose_factor=2", "adapter.rank=32"],
    "lora, rank 6": ["adapter.rank=6"],
    "lokr, factor 4, `full_matrix=true`": ["adapter=lokr", "adapter.decompose_factor=4", "adapter.full_matrix=true"],
}


def at_the_best_rate(overrides: Sequence[str]) -> list[Figures]:
    """Return figures at the learning rate, of three, with the highest held-out PSNR of the first seed."""

    def first(rate: str) -> float:
        return last_row(train(*overrides, f"optimizer.lr={rate}", seeds=[1])[0])["psnr"]

    best = max(("1.5e-3", "5e-3", "1.5e-2"), key=first)
    found = []
    for run in train(*overrides, f"optimizer.lr={best}"):
        checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
        parameters = sum(tensor.numel() for tensor in checkpoint["state_dict"].values())
        found.append({"learning rate": float(best), "parameters": parameters, "PSNR, dB": last_row(run)["psnr"]})
    return found


SECTIONS = [
    Section(
        "adapters",
        ADAPTERS,
        at_the_best_rate,
        {"learning rate": 4, "parameters": 0, "PSNR, dB": 2},
        draw=draw_pairs,
    )
]
