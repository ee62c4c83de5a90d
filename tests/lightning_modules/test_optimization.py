"""Settings of the optimizer, and checkpoints with and without an average."""

from functools import partial

import bitsandbytes
import prodigyopt
import pytest
import schedulefree
import torch
from torch.utils._pytree import tree_leaves

from foundation.errors import UserError
from lightning_modules.ema import EMA
from lightning_modules.optimization import Optimization


@pytest.mark.parametrize("settings", [{"wieght_decay": 0.1}, {"betas": (2.0, 0.9)}])
def test_settings_that_an_optimizer_refuses_are_named_before_loading(settings):
    refused = Optimization(partial(torch.optim.AdamW, lr=1e-4, **settings), None, 1, None)
    with pytest.raises(UserError, match=r"^optimizer: "):
        refused.check_optimizer()


def test_average_cannot_begin_or_end_in_a_run():
    with pytest.raises(UserError, match="the checkpoint is of a run without an average"):
        Optimization(None, None, 1, EMA(5, "ema")).load({})
    with pytest.raises(UserError, match=r"the checkpoint is of a run with ema\.half_life"):
        Optimization(None, None, 1, None).load({"ema": {}})


@pytest.mark.parametrize(
    "kind", [schedulefree.AdamWScheduleFree, prodigyopt.Prodigy, torch.optim.AdamW, bitsandbytes.optim.AdamW8bit]
)
def test_skipped_step_changes_nothing_of_an_optimizer(kind):
    weights = torch.nn.Parameter(torch.ones(4096))  # bitsandbytes keeps the state of fewer in 32 bits
    optimizer = kind([weights], lr=0.1)
    getattr(optimizer, "train", lambda: None)()  # schedule-free
    optimization = Optimization(None, None, 9, None)

    def step(gradient):
        weights.grad = torch.full((4096,), gradient)
        optimization.note(["key"], torch.tensor([gradient]))
        optimization.before_step(optimizer, 1, None, None)
        optimizer.step()
        optimization.after_step()
        state = tree_leaves((weights.data, optimizer.state_dict()))
        return [one.tolist() if isinstance(one, torch.Tensor) else one for one in state]

    before = [step(0.5), step(0.25)][-1]
    assert step(float("nan")) == before
    assert step(0.125) != before
