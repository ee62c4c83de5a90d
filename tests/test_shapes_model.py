"""Shapes makes images from captions, which the embedded model does not."""

import re
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from PIL import Image, ImageChops

from benchmarks.shapes.base import right_image
from benchmarks.shapes.subject import SHAPES
from tests.support.commands import ROOT


def test_makes_images_from_captions_in_the_stock_pipeline_and_predict_gives_the_same(run, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    card = (SHAPES / "README.md").read_text(encoding="utf-8")
    command = re.search(r"python predict.py (.*) prompt=\"([^\"]+)\"", card)
    pipe = FluxKontextPipeline.from_pretrained(SHAPES, dtype=torch.float32)
    sizes = {"height": 64, "width": 64, "max_area": 64 * 64, "_auto_resize": False}
    settings = {"num_inference_steps": 10, "max_sequence_length": 16, "generator": torch.Generator().manual_seed(0)}
    made = pipe(prompt=command[2], negative_prompt="", true_cfg_scale=3.0, **sizes, **settings).images[0]
    assert right_image(np.asarray(made, dtype=np.float32), command[2])
    run("predict", *command[1].split(), f"prompt={command[2]}", f"output_dir={tmp_path}")
    [picture] = Path(tmp_path).glob("*.png")
    assert max(high for _, high in ImageChops.difference(Image.open(picture), made).getextrema()) <= 1
