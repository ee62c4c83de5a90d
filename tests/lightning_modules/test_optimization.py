"""The optimizer's settings are checked before anything is loaded."""

from functools import partial

import pytest
import torch

from datamodules.errors import UserError
from lightning_modules.optimization import Optimization


@pytest.mark.parametrize("settings", [{"wieght_decay": 0.1}, {"betas": (2.0, 0.9)}])
def test_settings_that_an_optimizer_refuses_are_said_before_a_model_is_loaded(settings):
    refused = Optimization(partial(torch.optim.AdamW, lr=1e-4, **settings), None, 1, None)
    with pytest.raises(UserError, match=r"^optimizer: "):
        refused.check_optimizer()
