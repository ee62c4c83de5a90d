"""Train the same LoRA by diffusers' own Kontext script and by Retouch, and measure both by the same code.

The script is not in this repository: RETOUCH_PEER_SCRIPT is its path, and PYTHONPATH needs accelerate and datasets.
"""

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import CLIPTextModel

from benchmarks.peer import our_command, their_command, write_pipeline
from benchmarks.shapes.runs import (
    WORK,
    Figures,
    Made,
    Section,
    content,
    digest,
    draw_pairs,
    samples,
    settings,
    train,
    write_lines,
)
from benchmarks.training_speed import Measured, measure
from datamodules.images.alignment import edges, shift
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.pretrained.repository import SHAPES
from report.tables import read_validation

SCRIPT = "RETOUCH_PEER_SCRIPT"
SEEDS = (1, 2)
STEPS, BATCH, RANK = 200, 8, 16
PLACE = WORK / "peer" / digest()  # of the present base
THEIRS = "script"  # marks the script's rows


def settings_of(rate: str) -> list[str]:
    """Return Retouch's settings for the layers and the constant learning rate of the script."""
    layers = f"adapter.target_modules=[{','.join(FluxKontext.layers.targets)}]"
    return [layers, "scheduler=constant", f"optimizer.lr={rate}", "adapter.init_lora_weights=gaussian"]


def draw() -> None:
    """Write the pairs as the script reads them, and Shapes with a CLIP of the 77 tokens that it requires."""
    draw_pairs()
    data, pipeline = PLACE / "data", PLACE / "pipeline"
    for folder in (data, pipeline):
        shutil.rmtree(folder, ignore_errors=True)
    write_pipeline(pipeline, None)
    # CLIP reads from left to right: more positions leave its results as they are.
    weights = CLIPTextModel.from_pretrained(SHAPES / "text_encoder").state_dict()
    model = CLIPTextModel.from_pretrained(pipeline / "text_encoder")
    for name, tensor in model.state_dict().items():
        tensor[: len(weights[name])] = weights[name]
    model.save_pretrained(pipeline / "text_encoder")
    data.mkdir()
    names = ("file_name", "control_file_name")
    rows = [json.loads(line) for line in (WORK / "segment" / "train.jsonl").read_text().splitlines()]
    for name in (row[one] for row in rows for one in names):
        shutil.copy(WORK / "segment" / name, data)
    write_lines(data / "metadata.jsonl", [json.dumps({one: row[one] for one in (*names, "prompt")}) for row in rows])


def trained(row: Sequence[str], seed: int) -> tuple[Path, Measured]:
    """Return the folder of a LoRA and what its training took, from an earlier sweep if it is there."""
    chosen = settings([one for one in row if "=" in one])
    folder = PLACE / digest(row, seed, STEPS, BATCH, RANK, chosen, content("WORK/segment"))
    out, done = folder / "out", folder / "done.json"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        options = Namespace(size=64, tokens=16, steps=STEPS, batch=BATCH, rank=RANK, checkpointing=False, overrides=[])
        options.pipeline = PLACE / "pipeline"
        if THEIRS in row:
            options.script = Path(os.environ[SCRIPT])
            rate = next(one for one in row if one.startswith("optimizer.lr=")).partition("=")[2]
            line = their_command(options, "float32", PLACE / "data", folder)
            took = measure([*line, f"--learning_rate={rate}", f"--seed={seed}"], folder / "steps.csv")
        else:
            line = our_command(options, "float32", WORK / "segment" / "train.jsonl", folder)
            # The embedded base has settings of its own, which are the plain command's.
            own = [one for one in line if not one.startswith(("model=", "model.pretrained", "optimizer.lr="))]
            took = measure([*own, "model=embedded", f"seed={seed}", *row], out / "metrics.csv")
        done.write_text(json.dumps(took))
    return out, Measured(*json.loads(done.read_text()))


def beside(row: Sequence[str]) -> list[Figures]:
    """Return the quality of each seed's LoRA, by the same code for all, and the seconds and memory of its training."""
    figures = []
    for seed in SEEDS:
        lora, took = trained(row, seed)
        settings = [*(one for one in row if one != THEIRS), f"adapter.init_from={lora}", "trainer.max_steps=1"]
        [run] = train(*settings, seeds=[seed])
        first = read_validation(run / "validation.csv")[0]
        quality = {"PSNR, dB": first["psnr"], "mask IoU": first["mask_iou"]}
        placed = misplaced(list(samples(run, 0).values()))
        figures.append({**quality, **placed, "seconds": took.seconds, "memory, MB": took.memory})
    return figures


def misplaced(made: Sequence[Made]) -> Figures:
    """Return the median shift of results against their targets, and the mean of their difference."""
    pairs = [[edges(part.mean(-1) / 255) for part in (one.target, one.result)] for one in made]
    shifts = [np.hypot(*shift(target, result)[:2]) for target, result in pairs]
    bias = float(np.mean([one.result - one.target for one in made]))
    return {"shift, pixels": float(np.median(shifts)), "colour, levels": bias}


SECTIONS = [
    Section(
        "peer",
        {
            "diffusers' script": [THEIRS, *settings_of("1e-4")],
            "Retouch, the script's settings": settings_of("1e-4"),
            "diffusers' script, lr 3e-3": [THEIRS, *settings_of("3e-3")],
            "Retouch, the script's settings, lr 3e-3": settings_of("3e-3"),
            "Retouch, its own settings": [],
        },
        beside,
        {"PSNR, dB": 2, "mask IoU": 3, "shift, pixels": 2, "colour, levels": 1, "seconds": 0, "memory, MB": 0},
        draw=draw,
        missing=lambda: None if os.environ.get(SCRIPT) else f"needs {SCRIPT}, the path of diffusers' script",
    )
]
