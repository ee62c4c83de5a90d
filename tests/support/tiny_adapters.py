"""Adapters of a tiny FLUX Kontext, in a module of ours and in a stock pipeline."""

import torch
from diffusers import FluxKontextPipeline
from hydra.utils import instantiate

from lightning_modules.adapters.adapter import trainable
from lightning_modules.lora_files.writing import write
from tests.support.commands import compose
from tests.support.other_adapters import OTHERS

RANK = 4
ADAPTERS = ["tlora", "ortho_tlora"]
LAYER = "transformer_blocks.0.attn.to_q"


def build(tiny, adapter, *more, dtype="float32"):
    """Build a module with a fresh adapter, masked by each sample's t."""
    settings = OTHERS.get(adapter, [f"adapter={adapter}", f"adapter.rank={RANK}", "adapter.alpha=6"])
    module = instantiate(
        compose("train", "model=flux_kontext", f"model.dtype={dtype}", *settings, *more).model,
        pretrained_model_name_or_path=str(tiny),
        max_sequence_length=16,
    )
    module.configure_model()
    return module


def learn(module, spread=0.1):
    """Let the weights be those of an adapter that has learned."""
    generator = torch.Generator().manual_seed(7)
    for parameter in trainable(module.transformer).values():
        parameter.data += spread * torch.randn(parameter.shape, generator=generator).to(parameter)


def batch(samples=2):
    generator = torch.Generator().manual_seed(1)
    shapes = (samples, 8, 4, 6), (samples, 8, 4, 6), (samples, 16, 32), (samples, 32)
    x_t, control, text, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    return x_t, [control], {"prompt_embeds": text, "pooled_prompt_embeds": pooled}


def velocity(module, t):
    x_t, controls, prompt = batch(len(t))
    return module.denoise(x_t, torch.tensor(t), controls, prompt)


def gradients(module):
    """Return the gradients of the trainable parameters by name."""
    return {name: parameter.grad.clone() for name, parameter in trainable(module.transformer).items()}


def export(module, path):
    adapter = module.adapter
    write(path, adapter.deltas(module.transformer), {"adapter": adapter.metadata()})


def load(tiny, tmp_path, *adapters, names=("a", "b")):
    """Load a stock pipeline with trained adapters."""
    stock = FluxKontextPipeline.from_pretrained(tiny)
    stock.set_progress_bar_config(disable=True)
    for name, (adapter, *more) in zip(names, adapters, strict=False):
        module = build(tiny, adapter, *more)
        learn(module)
        export(module, tmp_path / name / "pytorch_lora_weights.safetensors")
        stock.load_lora_weights(tmp_path / name, adapter_name=name)
    return stock


def picture(pipeline, steps=2, **more):
    """Small, as latents."""
    settings = {"height": 32, "width": 32, "max_area": 1024, "max_sequence_length": 16, "output_type": "latent"}
    generator = torch.Generator().manual_seed(0)
    return pipeline(prompt="x", num_inference_steps=steps, generator=generator, **settings, **more).images
