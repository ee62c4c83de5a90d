"""A training step on a GPU that is none: every family, adapter, quantization and offloading."""

from functools import cache

import pytest
import torch
from hydra.utils import instantiate

from datamodules.batch import LatentBatch
from lightning_modules.adapters.adapter import trainable
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.pretrained import checks, repository, transformer
from tests.support.commands import compose
from tests.support.fake_cuda import DEVICE, backward, fake_cuda
from tests.support.other_adapters import OTHERS
from tests.support.steps import inputs
from tests.support.tiny_pipelines import MODELS

ADAPTERS = {
    "lora": ["adapter=lora"],
    "tlora": ["adapter=tlora"],
    "full": ["adapter=full"],
}
FP8, FP4 = "model/quantization=fp8", "model/quantization=fp4"
QUANTIZATIONS = {
    "bf16": [],
    "fp8": [FP8],
    "nf4": [FP4, "model.quantization.format=nf4"],
}
# What must have been seen to compute, within operators of ours.
KERNELS = {"fp8": "aten::_scaled_mm", "nf4": "bitsandbytes::dequantize_4bit"}
# The offloading of a step, and its checkpointing policy.
PLAIN = {"none": "none"}
ACTIVATIONS = {"activations": "selective"}
STREAMED = {"blocks_and_activations": "full"}

# The family that stands for the others where these do nothing of their own.
WHOLE = "qwen_image_edit_plus"
FAMILIES = [name for name, model in MODELS.items() if not model.variant and name != WHOLE]
CASES = [
    *((name, "bf16", "lora", ACTIVATIONS) for name in FAMILIES),
    (WHOLE, "bf16", "tlora", ACTIVATIONS),
    (WHOLE, "bf16", "full", PLAIN),
    (WHOLE, "fp8", "lora", STREAMED),
    (WHOLE, "nf4", "lora", PLAIN),
    ("flux_kontext", "fp8", "lokr", STREAMED),
]


@cache
def settings(*overrides):
    return compose("train", *overrides).model


def build(repositories, cuda, model, quantization, adapter, streamed):
    """Build a module as Lightning does."""
    path = f"model.pretrained_model_name_or_path={repositories[model]}"
    chosen = settings(f"model={model}", path, *MODELS[model].settings).copy()
    chosen.adapter = settings(*(ADAPTERS | OTHERS)[adapter]).adapter
    chosen.quantization = settings(*QUANTIZATIONS[quantization]).quantization
    chosen.offload = {"encoders": False, "blocks": 2 if streamed else 0, "activations": True}
    module = instantiate(chosen, _convert_="all")
    module._device = DEVICE
    module.check()
    with cuda.configuring():
        module.configure_model()
    module.flow.caption_dropout_rate = 0.5
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
def cuda(monkeypatch):
    """Set up a fake GPU and models of two blocks."""
    config, fewer = transformer.transformer_config, {"num_layers": 1, "num_single_layers": 1}
    small = lambda *where: (found := config(*where)) | (fewer if "num_single_layers" in found else {})  # noqa: E731
    monkeypatch.setattr(transformer, "transformer_config", small)
    monkeypatch.setattr(checks, "refuse_unexpected", lambda *_: None)  # of the other blocks
    monkeypatch.setattr(repository, "refuse_unexpected", lambda *_: None)
    with fake_cuda() as cuda:
        yield cuda


@pytest.mark.parametrize(
    ("model", "quantization", "adapter", "chosen"),
    CASES,
    ids=lambda x: "_".join(x) if isinstance(x, dict) else x,
)
def test_step_is_on_the_device_alone(repositories, cuda, model, quantization, adapter, chosen):
    """Configured under a foreign default; loss and backward pass make nothing elsewhere, and read nothing back."""
    module = build(repositories, cuda, model, quantization, adapter, "full" in chosen.values())
    weights = {name: tensor.device for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    assert set(weights.values()) == {DEVICE}
    latents, activations = batch(module), module.execution._activations
    activations.least = 0
    for offload, policy in chosen.items():
        set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask)
        module.execution._activations = activations if "activations" in offload else None
        module.zero_grad()
        step(cuda, module, latents)
        assert not cuda.found, offload
        assert cuda.attended == {(torch.bfloat16,) * 3: cuda.attended.total()}
        assert cuda.attended.total() >= 2
        assert ("offload.py" in {file for file, _ in cuda.allowed}) == ("activations" in offload)
        assert KERNELS.get(quantization, "aten::mm") in cuda.called
        gradients = [weight.grad for weight in trainable(module.transformer).values() if weight.grad is not None]
        assert {(one.dtype, one.device) for one in gradients} == {(torch.float32, DEVICE)}


FAULTS = {
    "makes a tensor on the host": lambda x: x * torch.ones(()),
    "reads from the device": lambda x: x * x.mean().cpu(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_step_that_is_not_on_the_device_alone_is_seen(repositories, cuda, monkeypatch, fault):
    module = build(repositories, cuda, "flux_kontext", "bf16", "lora", False)
    monkeypatch.setattr(module, "normalize", FAULTS[fault])
    step(cuda, module, batch(module))
    assert any(fault in what and place == "<lambda>" for what, _, place in cuda.found)
