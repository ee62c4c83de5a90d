"""What the stock pipelines of diffusers make of the same request."""

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from tests.support.tiny_pipelines import AREA, MODELS


def shrink_condition_images(monkeypatch, vae: int, condition: int) -> None:
    """Let the stock Qwen pipelines resize condition images to fewer pixels than their own, to save time."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: dimensions(vae, ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", vae)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", condition)


def stock_picture(repository, lora, monkeypatch, dtype=torch.float32, prepare=None, **settings):
    """What the stock pipeline makes with a LoRA, its condition images as small as the run's.

    Args:
        prepare: called with the pipeline and the LoRA when they are loaded.
    """
    shrink_condition_images(monkeypatch, AREA, AREA)
    pipeline = DiffusionPipeline.from_pretrained(repository, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None:
        pipeline.load_lora_weights(lora)
    if prepare is not None:
        prepare(pipeline, lora)
    generator = torch.Generator().manual_seed(11)
    return pipeline(**settings, generator=generator, output_type="np").images[0]


def same_request(model, root):
    """The stock pipeline's arguments and predict.py's, with the first sample's condition images and true CFG."""
    request = ["seed=11", "width=64", "height=32"]
    request += ["num_inference_steps=3", "true_cfg_scale=3", "negative_prompt=blurry"]
    call = {"num_inference_steps": 3, "true_cfg_scale": 3.0, "negative_prompt": "blurry", "width": 64, "height": 32}
    controls = sorted(root.glob("control_images/0*"))
    if controls:
        request = [*request, f"image={controls[0]}"]
        images = [Image.open(path) for path in controls]
        call = call | {"image": images if MODELS[model].takes_list else images[0]}
    if "guidance_scale" in MODELS[model].call:
        request = [*request, f"guidance_scale={MODELS[model].call['guidance_scale']}"]
    return call | MODELS[model].call, request
