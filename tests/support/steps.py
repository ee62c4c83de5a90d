"""Training steps of tiny models, however they are executed."""

import torch

from tests.support.commands import unloaded
from tests.support.tiny_adapters import build, gradients, learn

BASES = {
    "float32": [],
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
    "fp4": ["model/quantization=fp4"],
    "int8_w8a8": ["model/quantization=int8_w8a8", "model.quantization.rotation=false"],
    "rotated": ["model/quantization=int8_w8a8"],
}


def made(tiny, adapter, base, *more):
    settings = [*BASES[base], "model.gradient_checkpointing=none", *more]
    module = build(tiny, adapter, *settings, dtype="float32" if base == "float32" else "bfloat16")
    learn(module)
    return module


def step(module):
    """Return loss and gradients under autocast."""
    module.transformer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = module.denoise(*inputs(module)).float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert len(one) > 14
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def with_a_block_of_each_kind(module):
    """Keep one block of each kind, to compile less."""
    transformer = module.transformer
    del transformer.transformer_blocks[1:]
    del transformer.single_transformer_blocks[:-1]
    learn(module)
    return module


def inputs(module, samples=2, width=12, text=None):
    """Return x_t, t, controls and prompt of any family; where the text has a mask, one sample's ends early."""
    generator = torch.Generator().manual_seed(1)
    channels = module.geometry.channels(module.transformer.config)
    controls = [] if module.condition_images.most == 0 else [(8, 8)]
    x_t, *controls = (torch.randn(samples, channels, *size, generator=generator) for size in ((8, width), *controls))
    shapes = module.prompt_shapes(module.base.source.config(), "make it snow", [(32, 32)] * len(controls))
    if text is not None:
        shapes = {name: (text, *shape[1:]) if len(shape) > 1 else shape for name, shape in shapes.items()}
    prompt = {name: torch.randn(samples, *shape, generator=generator) for name, shape in shapes.items()}
    if "pooled_prompt_embeds" not in prompt:
        mask = torch.ones(prompt["prompt_embeds"].shape[:2], dtype=torch.bool)
        mask[-1, -3:] = False
        prompt["prompt_embeds_mask"] = mask
    return x_t, torch.linspace(0.2, 0.7, samples), controls, prompt


def family(repository, model, *more):
    """Build a family's module in float32 with an adapter on every layer."""
    settings = ["model.dtype=float32", "adapter.rank=4", "adapter.target_modules=all-linear", *more]
    module = unloaded(repository, model, *settings)
    module.configure_model()
    learn(module)
    return module
