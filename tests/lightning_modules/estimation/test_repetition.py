"""Estimates by a few of a transformer's blocks equal those by all of them."""

import pytest
import torch
from torch import nn

from lightning_modules.estimation import repetition
from lightning_modules.estimation.flops import CAPTION, empty_latents, step_flops
from lightning_modules.objectives.objective import ONE, Passes
from tests.support.steps import family

SIZE = (((128, 128), (128, 128)), ())


def deep(repository):
    """Return a tiny FLUX.2 of many blocks and an empty batch."""
    module = family(repository, "flux2_klein_4b")
    meta = module.base.source.meta
    with torch.device("meta"):
        module.base.source.meta = type(meta).from_config({**meta.config, "num_layers": 2, "num_single_layers": 14})
    return module.execution, empty_latents(module, module.base, SIZE, 1, CAPTION)


@pytest.mark.parametrize("passes", [ONE, Passes(2, 1)])
def test_work_counted_by_few_blocks_is_that_of_all(repositories, monkeypatch, passes):
    execution, batch = deep(repositories["flux2_klein_4b"])
    transformer = execution.adapted_meta_transformer().float()
    few = step_flops(execution, transformer, batch, passes)
    monkeypatch.setattr(repetition, "_are_equal", lambda _: False)
    assert step_flops(execution, transformer, batch, passes) == few


def test_list_of_different_blocks_is_measured_whole():
    model = nn.Module()
    model.same = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    model.other = nn.ModuleList(nn.Linear(2, 2 + at) for at in range(2))
    least, growth = repetition.measure_few(model, 1, lambda: (len(model.same), len(model.other)))
    assert least == (2, 2)
    assert growth == [repetition.Growth((1, 0), 7)]
    assert (len(model.same), len(model.other)) == (9, 2), "the blocks are back"
