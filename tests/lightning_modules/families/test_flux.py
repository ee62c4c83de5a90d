"""FLUX.1 Kontext: what its parity tests do not show."""

import pytest
import torch

from datamodules.pairs import collate_pixels
from lightning_modules.family import Sampling
from tests.support.objectives import losses
from tests.support.references import REFERENCES, condition_images, raw_sample

REFERENCE = REFERENCES["flux_kontext"]


@pytest.fixture
def module(tiny):
    return REFERENCE.build(tiny)


def raw_batch(module, folder):
    return collate_pixels([raw_sample(module, condition_images([(48, 32)], shift=n), folder, n) for n in range(2)])


def test_each_control_image_conditions_the_sampled_image(module, tmp_path):
    raw = raw_sample(module, condition_images([(48, 32), (32, 32)]), tmp_path)
    sampling = Sampling(3, 2.5, 1.0, None)
    sampled = []
    for change in (lambda: None, lambda: raw.controls[1].neg_(), raw.controls.pop):
        change()
        sampled.append(module.sampler.sample(module.encoder(raw), sampling, (48, 32), [1]))
    both, other, one = sampled
    assert (both - other).abs().max() > 1e-3
    assert (both - one).abs().max() > 1e-3


def test_bf16_base_keeps_float32_adapter_and_learns_under_autocast(tiny, tmp_path):
    module = REFERENCE.build(tiny, "model.dtype=bfloat16")
    trained = {n: p for n, p in module.transformer.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for n, p in module.transformer.named_parameters() if n not in trained} == {torch.bfloat16}
    seen = {}
    module.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses(module, module.encoder(raw_batch(module, tmp_path))).mean()
    loss.backward()
    assert loss.dtype == torch.float32
    assert seen["timestep"].dtype == seen["hidden_states"].dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())
