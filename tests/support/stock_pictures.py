"""Images of diffusers' stock pipelines for the same request."""

from functools import partial
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, Krea2Pipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from tests.support.krea2_editing import EditingKrea2
from tests.support.tiny_flux3 import StockFlux3
from tests.support.tiny_pipelines import AREA, MODELS


def load_stock(repository, **how):
    """Return a repository's pipeline as diffusers loads it."""
    modular = (Path(repository) / "modular_model_index.json").is_file()
    return StockFlux3(repository, **how) if modular else DiffusionPipeline.from_pretrained(repository, **how)


def shrink_condition_images(monkeypatch, vae: int, condition: int) -> None:
    """Let the stock pipelines resize condition images to fewer pixels than their own, to save time."""
    for module in (pipeline_qwenimage_edit, pipeline_longcat_image_edit):
        fewer = partial(module.calculate_dimensions, vae)
        monkeypatch.setattr(module, "calculate_dimensions", lambda _, ratio, fewer=fewer: fewer(ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", vae)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", condition)


def stock_picture(repository, lora, monkeypatch, dtype=torch.float32, prepare=None, **settings):
    """Return the stock pipeline's image with a LoRA, its condition images as small as the run's."""
    shrink_condition_images(monkeypatch, AREA, AREA)
    pipeline = load_stock(repository, torch_dtype=dtype)
    if "image" in settings and isinstance(pipeline, Krea2Pipeline):
        pipeline = EditingKrea2.of(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None and hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(lora)
    elif lora is not None:
        pipeline.transformer.load_lora_adapter(lora, prefix="transformer", use_safetensors=True)
    if prepare is not None:
        prepare(pipeline, lora)
    generator = torch.Generator().manual_seed(11)
    return pipeline(**settings, generator=generator, output_type="np").images[0]


def same_request(model, root):
    """Return guided arguments of the stock pipeline and of predict.py for the first sample's condition images."""
    tiny = MODELS[model]
    request = ["seed=11", "width=64", "height=32", "num_inference_steps=3"]
    request += [f"{name}={value}" for name, value in tiny.guidance.items()]
    call = {"num_inference_steps": 3, **({"width": 64, "height": 32} if tiny.sized else {}), **tiny.guidance}
    controls = sorted(root.glob("control_images/0*"))
    if controls:
        request = [*request, f"image={controls[0]}"]
        images = [Image.open(path) for path in controls]
        call = call | {"image": images if tiny.takes_list else images[0]}
    return call | tiny.call, request
