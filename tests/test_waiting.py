"""Nothing waits: neither a step for the device, nor the trainer for data without saying so."""

import time
from contextlib import nullcontext

import pytest
import torch

from datamodules.prefetch import Prefetcher
from lightning_modules.edit_module import EditModule
from tests.support.combinations import first
from tests.support.commands import metrics, short
from tests.support.objectives import EVERYTHING
from tests.support.watch import Watch

SETTINGS = ["trainer.log_every_n_steps=4", "save_every=0", "data.batch_size=2", "data.caption_dropout_rate=0.3"]
OTHERS = ["adapter=tlora", "model.dtype=bfloat16", "model/quantization=fp8", "trainer.accumulate_grad_batches=2"]
OTHERS += ["ema.half_life=9", "model.offload.activations=true", "+trainer.gradient_clip_algorithm=value"]


@pytest.mark.parametrize("more", first(1, [OTHERS, [*EVERYTHING, "objective.preserve.every=2"]]))
def test_no_step_waits_for_the_device_between_two_readings(run, tiny, pairs, tmp_path, watch, more):
    run("train", *short(tiny, pairs, tmp_path / "run", 4), *SETTINGS, *more)
    assert list(watch.found) == [1, 2, 3, 4]
    waits = {step for step, found in watch.found.items() if found}
    assert waits == {1, 4}, watch.found


def test_the_watch_finds_operators_that_wait():
    watch, weight = Watch(), torch.ones(2)
    for step, waits in enumerate((lambda: (2 * weight).mean().item(), lambda: torch.zeros(1).to(weight.device))):
        watch.begin(step, weight)
        waits()
        watch.end()
        assert watch.found[step]


@pytest.mark.slow
def test_waiting_for_data_is_logged(run, tiny, pairs, tmp_path, monkeypatch):
    """Make first the steps, then the loader, half a second slower."""
    from datamodules.shards.reader import LatentReader

    shares = []
    for slow, method in ((EditModule, "training_step"), (LatentReader, "__call__")):
        folder = tmp_path / method
        at_once = getattr(slow, method)
        monkeypatch.setattr(slow, method, lambda *args, act=at_once: time.sleep(0.5) or act(*args))
        run("train", *short(tiny, pairs, folder, 3), "save_every=0")
        shares.append(float(metrics(folder)[-1]["data_wait"]))
        monkeypatch.setattr(slow, method, at_once)
    assert shares[0] < 0.3
    assert shares[1] > 0.6


def test_prefetching_raises_errors_of_the_loader():
    def broken():
        yield from ()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        next(iter(Prefetcher(broken(), torch.device("cpu"))))


def test_gpu_computes_a_step_while_the_batch_after_the_next_is_copied(monkeypatch):
    """The trainer fetches a batch before each step: the queue of the GPU must not wait for a copy that starts then."""
    queue, copies = [], []

    class Stream:
        def __init__(self, _=None):
            pass

        def record_event(self):
            return copies[-1]

        def wait_event(self, event):
            queue.append(f"wait for {event}")

    class Batch:
        def __init__(self, number):
            self.number = number

        def to(self, _):
            copies.append(self.number)
            return self

        def tensors(self):
            return []

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    batches = iter(Prefetcher(map(Batch, range(4)), torch.device("cuda")))
    batch, following = next(batches), next(batches, None)
    while batch is not None:
        queue.append(f"step {batch.number}, copied to {copies[-1]}")
        batch, following = following, next(batches, None)
    assert queue == [
        *("wait for 0", "wait for 1", "step 0, copied to 2"),
        *("wait for 2", "step 1, copied to 3"),
        *("wait for 3", "step 2, copied to 3", "step 3, copied to 3"),
    ]
