"""Estimates by a few of a transformer's blocks equal those by all of them."""

import pytest
import torch
from torch import nn

from lightning_modules.blocks import blocks
from lightning_modules.estimation import repetition
from lightning_modules.estimation.flops import CAPTION, empty_latents, step_flops
from lightning_modules.estimation.memory import FakeStep
from lightning_modules.objectives.objective import ONE, Passes
from tests.support.steps import family

SIZE = (((128, 128), (128, 128)), ())


def deep(repository, *overrides):
    """Return a tiny FLUX.2 of many blocks, its settings as in train.py, and an empty batch."""
    module = family(repository, "flux2_klein_4b", *overrides)
    meta = module.base.source.meta
    with torch.device("meta"):
        module.base.source.meta = type(meta).from_config({**meta.config, "num_layers": 2, "num_single_layers": 14})
    return module.execution, empty_latents(module, module.base, SIZE, 1, CAPTION)


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "passes"), [((), ONE), (("adapter.rank=64",), Passes(2, 1))])
def test_estimates_by_few_blocks_equal_those_by_all_to_the_byte(repositories, monkeypatch, overrides, passes):
    execution, batch = deep(repositories["flux2_klein_4b"], *overrides)
    ran = []

    def estimates():
        step = FakeStep(execution, batch, passes)
        for block in blocks(step.transformer).values():
            block.register_forward_pre_hook(lambda *_: ran.append(1))
        transformer = execution.adapted_meta_transformer().float()
        peaks = [step.peak(policy) for policy in ("none", "every_3", "full")]
        return *peaks, step_flops(execution, transformer, batch, passes)

    few, count = estimates(), len(ran)
    monkeypatch.setattr(repetition, "blocks", lambda _: {})
    assert estimates() == few
    assert passes != ONE or count < (len(ran) - count) * 0.9, "it is quicker"


def test_list_of_different_blocks_is_measured_whole():
    model = nn.Module()
    model.same = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    model.other = nn.ModuleList(nn.Linear(2, 2 + at) for at in range(2))
    least, growth = repetition.measure_few(model, 1, lambda: (len(model.same), len(model.other)))
    assert least == (2, 2)
    assert growth == [((1, 0), 7)]
    assert (len(model.same), len(model.other)) == (9, 2), "the blocks are back"
