"""A training step on a GPU that is none: every family, adapter, quantization and offloading."""

import pytest
import torch

from datamodules.batch import LatentBatch
from lightning_modules.adapters.adapter import trainable
from tests.support.commands import unloaded
from tests.support.fake_cuda import DEVICE, backward, fake_cuda
from tests.support.other_adapters import OTHERS
from tests.support.steps import inputs
from tests.support.tiny_pipelines import DIFFERENT, MODELS

FP8, INT8, NF4 = ([f"model/quantization={format}"] for format in ("fp8", "int8_w8a8", "nf4"))
STREAMED = ["model.offload.blocks=2", "model.gradient_checkpointing=full", "model.offload.activations=true"]
PLAIN = ["model.gradient_checkpointing=none"]
OFFLOADED = ["model.gradient_checkpointing=attention", "model.offload.activations=true"]

# The family that stands for the others where these do nothing of their own.
WHOLE = "qwen_image_edit_plus"
LOKR = "flux_kontext"
# The quick suite has these; they contain FLUX.1 and Qwen-Image, streamed blocks, offloaded activations and masks.
QUICK = ("tlora", "rotated", "nf4", "lokr")
# The model, its settings, and an operator that must have been seen within those of ours.
CASES = {
    **{name: (name, OFFLOADED, "aten::mm") for name in DIFFERENT if name not in (WHOLE, LOKR)},
    "tlora": (WHOLE, [*OFFLOADED, "adapter=tlora"], "aten::mm"),
    "full": (WHOLE, [*PLAIN, "adapter=full"], "aten::mm"),
    "rotated": (WHOLE, [*STREAMED, *INT8, "model.quantization.rotation=true"], "aten::_int_mm"),
    "nf4": (WHOLE, [*PLAIN, *NF4], "bitsandbytes::dequantize_4bit"),
    "lokr": (LOKR, [*STREAMED, *FP8, *OTHERS["lokr"]], "aten::_scaled_mm"),
}


def build(repositories, cuda, model, *settings):
    module = unloaded(repositories[model], model, *MODELS[model].settings, *settings)
    module._device = DEVICE
    module.check()
    with cuda.configuring():
        module.configure_model()
    module.base.components["scheduler"]
    return module


def step(cuda, module, latents):
    with cuda.step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = module.training_step(latents.to(DEVICE), 0)["loss"]
        backward(loss)


def batch(module):
    """Build two samples with every optional part of a batch."""
    target, _, controls, prompt = inputs(module)
    empty = {name: tensor[:1] for name, tensor in prompt.items()}
    return LatentBatch(["a", "b"], [0, 1], target, target, controls, prompt, empty, torch.ones(2, 1, 64, 96))


@pytest.fixture
def cuda():
    with fake_cuda() as cuda:
        yield cuda


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CASES])
def test_step_runs_entirely_on_the_device(repositories, cuda, case):
    """Configured under a foreign default; loss and backward pass make nothing elsewhere, and read nothing back."""
    model, settings, operator = CASES[case]
    module = build(repositories, cuda, model, *settings)
    weights = {name: tensor.device for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    assert set(weights.values()) == {DEVICE}
    offloads = "model.offload.activations=true" in settings
    if offloads:
        module.execution._activations.least = 0
    step(cuda, module, batch(module))
    assert not cuda.found
    assert cuda.attended >= 2
    assert ("offload.py" in {file for file, _ in cuda.allowed}) == offloads
    assert operator in cuda.called
    assert not any(name.startswith("retouch::") for name in cuda.called)  # which cost Python in each call
    gradients = [weight.grad for weight in trainable(module.transformer).values() if weight.grad is not None]
    assert {(one.dtype, one.device) for one in gradients} == {(torch.float32, DEVICE)}


FAULTS = {
    "makes a tensor on the host": lambda x: x * torch.ones(()),
    "reads from the device": lambda x: x * x.mean().cpu(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_step_that_leaves_the_device_is_found(repositories, cuda, monkeypatch, fault):
    module = build(repositories, cuda, "flux_kontext", *PLAIN)
    monkeypatch.setattr(module.flow, "normalize", FAULTS[fault])
    step(cuda, module, batch(module))
    assert any(fault in what and place == "<lambda>" for what, _, place in cuda.found)
