"""What an exported LoRA's pictures are beside those of the LoRA that it was made of."""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig
from PIL import Image

from callbacks.image_writer import PREDICTIONS
from callbacks.signals import stop
from datamodules.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from tasks.edit import make_pictures, requests
from tasks.models import KnownModel
from tasks.placement import place_trainer

PICTURES = "pictures"
ASKED = ("image", "prompt", "prompts_file")


class Difference(NamedTuple):
    """The mean absolute differences of pictures' numbers, in 8 bits.

    Attributes:
        exported: from the pictures with the LoRA to those with its export.
        edit: from those without the LoRA to those with it.
        pictures: how many each of them are.
    """

    exported: float
    edit: float
    pictures: int


def are_asked_for(cfg: DictConfig) -> bool:
    """Whether there is something to make pictures of."""
    return any(cfg[key] is not None for key in ASKED)


def check_pictures(cfg: DictConfig, model: KnownModel, output_dir: Path) -> None:
    """Raise a UserError for pictures that cannot be made, before anything is written."""
    if cfg.merge is not None:
        raise UserError("pictures are compared with those of one LoRA: with merge= leave image= and prompt= out")
    if model.guessed:
        raise UserError(f"pictures need the model that the LoRA is for: pass model=NAME, as in model={model.name}")
    requests(cfg, None, [1.0])
    if cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1:
        raise UserError("task=export compares pictures on one device: leave trainer.devices and trainer.num_nodes out")
    if (output_dir / PICTURES).exists():
        raise UserError(f"output_dir={output_dir} already contains {PICTURES}: choose another folder")


def compare_pictures(cfg: DictConfig, lora: Path, exported: Path, output_dir: Path) -> Difference:
    """Make pictures with a LoRA, without it and with its export, by the same seeds; they stay in output_dir.

    Args:
        cfg: whose model is the one that the LoRA is for.
    """
    place_trainer(cfg)
    folders = output_dir / PICTURES / "before", output_dir / PICTURES / "exported"
    for folder, file, scales in zip(folders, (lora, exported), ([1.0, 0.0], [1.0]), strict=True):
        make_pictures(copy.deepcopy(cfg), AppliedLoRAs([file], merge=False), scales, folder)
        stop.check()
    before, without, after = (_pictures(*which) for which in ((folders[0], 1.0), (folders[0], 0.0), (folders[1], 1.0)))
    changes = [np.abs(one - other).mean() for one, other in zip(before, after, strict=True)]
    edits = [np.abs(one - other).mean() for one, other in zip(before, without, strict=True)]
    return Difference(float(np.mean(changes)), float(np.mean(edits)), len(changes))


def _pictures(folder: Path, scale: float) -> list[np.ndarray]:
    lines = (folder / PREDICTIONS).read_text(encoding="utf-8").rstrip("\n").split("\n")  # prompts may hold U+2028
    files = [row["file"] for row in map(json.loads, lines) if row["lora_scale"] == scale]
    return [np.asarray(Image.open(folder / file)).astype(float) for file in files]
