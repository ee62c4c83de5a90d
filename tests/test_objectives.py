"""Runs with every part of the objective at once: the same however samples are divided, and after a resume."""

import pytest

from tests.support.commands import lora_bytes, short
from tests.support.losses import EVERYTHING
from tests.support.same_runs import assert_close, assert_close_losses
from tests.support.several_runs import DDP

SETTINGS = [*EVERYTHING, "objective.preserve.every=2", "data.caption_dropout_rate=0.3", "scheduler=constant"]


def test_resumed_run_is_bitwise_the_uninterrupted_one(run, tiny, pairs, tmp_path):
    settings = [*SETTINGS, "adapter=tlora", "data.batch_size=2"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 5), *settings)
    run("train", *short(tiny, pairs, tmp_path / "half", 3), *settings)
    run("train", *short(tiny, pairs, tmp_path / "half", 5), *settings, "ckpt_path=last")
    assert lora_bytes(tmp_path / "half") == lora_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "one", 3), *SETTINGS, "data.batch_size=2")
    status, text = in_two_processes([[*short(tiny, pairs, tmp_path / "two", 3), *SETTINGS, *DDP]])
    assert status == 0, text
    assert_close(tmp_path / "one", tmp_path / "two")
    assert_close_losses(tmp_path / "one", tmp_path / "two")
