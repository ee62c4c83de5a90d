"""Runs with every part of the objective at once: the same however samples are divided, and after a resume."""

import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.commands import assert_same_weights, lora_bytes, metrics, short
from tests.support.losses import EVERYTHING
from tests.support.same_runs import assert_close, assert_close_losses
from tests.support.several_runs import DDP

SETTINGS = [*EVERYTHING, "objective.preserve.every=2", "data.caption_dropout_rate=0.3", "scheduler=constant"]


def test_accumulating_two_equals_batch_of_two(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "batch", 4), *SETTINGS, "data.batch_size=2")
    run("train", *short(tiny, pairs, tmp_path / "window", 4), *SETTINGS, "trainer.accumulate_grad_batches=2")
    assert_same_weights(tmp_path / "batch", tmp_path / "window", rtol=0, atol=1e-5)
    for one, other in zip(metrics(tmp_path / "batch"), metrics(tmp_path / "window"), strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-4)


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


@pytest.mark.slow
def test_steps_do_not_compile_anew(run, tiny, pairs, tmp_path, monkeypatch):
    """The two kinds of steps, with and without preserved prompts, compile once each."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    graphs = []
    for steps in (2, 8):
        counters.clear()
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        settings = ["model.compile=true", "data.batch_size=2", "model.gradient_checkpointing=none"]
        run("train", *short(tiny, pairs, tmp_path / "run", steps), *SETTINGS, *settings)
        graphs.append(counters["stats"]["unique_graphs"])
        torch.compiler.reset()
    assert graphs[0] == graphs[1] > 0
