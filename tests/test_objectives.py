"""Runs with every part of the objective at once: the same however samples are divided, and after a resume."""

import pytest

from tests.support.commands import lora_bytes, short
from tests.support.objectives import EVERYTHING
from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses

SETTINGS = [*EVERYTHING, "objective.preserve.every=2", "data.caption_dropout_rate=0.3", "scheduler=constant"]
SETTINGS += ["model.dtype=float32", "optimizer.lr=1e-3", SMOOTH_ADAM]


@pytest.mark.slow
def test_accumulating_is_the_batch_and_resuming_is_bitwise(run, tiny, pairs, tmp_path):
    """Every second optimizer step, not every second batch, uses the further prompts."""
    accumulated = [*SETTINGS, "adapter=tlora", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 3), *accumulated)
    run("train", *short(tiny, pairs, tmp_path / "half", 2), *accumulated)
    run("train", *short(tiny, pairs, tmp_path / "half", 3), *accumulated, "ckpt_path=last")
    assert lora_bytes(tmp_path / "half") == lora_bytes(tmp_path / "whole")
    run("train", *short(tiny, pairs, tmp_path / "batch", 3), *SETTINGS, "adapter=tlora", "data.batch_size=4")
    assert_close(tmp_path / "batch", tmp_path / "whole")
    assert_close_losses(tmp_path / "batch", tmp_path / "whole")
