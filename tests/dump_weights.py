from pathlib import Path

import lightning.pytorch as L
import torch

from lightning_modules.adapters.adapter import trainable


class DumpWeights(L.Callback):
    """Each rank's own copy of what it trained."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer, pl_module):
        torch.save(trainable(pl_module), self.folder / f"rank{trainer.global_rank}.pt")
