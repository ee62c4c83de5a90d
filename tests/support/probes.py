"""Callbacks that look into a run, or harm it."""

import sys
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


class LoadedModules(L.Callback):
    """Writes down what is imported when training ends."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_end(self, trainer, pl_module):
        self.file.write_text("\n".join(sys.modules))


class Vandal(L.Callback):
    """Damages images after they were checked and before they are read."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_fit_start(self, trainer, pl_module):
        for image in self.path.iterdir():
            image.write_bytes(image.read_bytes()[:200])
