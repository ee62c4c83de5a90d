"""Nothing waits: neither a step for the device, nor the trainer for data without saying so."""

import csv
import time
from unittest import mock

import pytest
import torch

from callbacks import metrics
from datamodules.prefetch import Prefetcher
from lightning_modules.edit_module import EditModule
from lightning_modules.objectives.flow_matching import FlowMatchingObjective
from lightning_modules.timing import StageTimer
from tests.support.combinations import first
from tests.support.commands import short
from tests.support.losses import EVERYTHING

SETTINGS = ["trainer.log_every_n_steps=4", "save_every=0", "data.batch_size=2", "data.caption_dropout_rate=0.3"]


@pytest.mark.parametrize(
    "more",
    [
        [
            "adapter=tlora",
            "model.dtype=bfloat16",
            "model/quantization=fp8",
            "trainer.accumulate_grad_batches=2",
            "ema.half_life=9",
            "model.offload.activations=true",
            "+trainer.gradient_clip_algorithm=value",
        ],
        [*EVERYTHING, "objective.preserve.every=2"],
    ],
)
def test_no_step_waits_for_the_device_between_two_readings(run, tiny, pairs, tmp_path, watch, more):
    run("train", *short(tiny, pairs, tmp_path / "run", 5), *SETTINGS, *more)
    assert list(watch.found) == [1, 2, 3, 4, 5]
    waits = {step for step, found in watch.found.items() if found}
    assert waits == {1, 4, 5}, watch.found


@pytest.mark.parametrize("waiting", first(1, ["item", "to"]))
def test_the_watch_sees_what_waits(run, tiny, pairs, tmp_path, watch, monkeypatch, waiting):
    losses = FlowMatchingObjective.losses

    def waits(self, *arguments):
        result = losses(self, *arguments)
        if waiting == "to":
            torch.zeros(1).to(result.device)
        else:
            result.mean().item()
        return result

    monkeypatch.setattr(FlowMatchingObjective, "losses", waits)
    run("train", *short(tiny, pairs, tmp_path / "run", 3), *SETTINGS)
    assert watch.found[2]


class _Allocator:
    """A double for the counters of CUDA's: what is there, and the most since the last reset."""

    def __init__(self):
        self.now = self.peak = 0

    def take(self, size):
        """And give it back."""
        self.peak = max(self.peak, self.now + size)

    def reset(self, device):
        self.peak = self.now


def test_peak_memory_is_that_of_steps(tmp_path, monkeypatch):
    """The peak excludes everything before the steps, and sample images and checkpoints between them."""
    allocator = _Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    module = mock.Mock(spec=EditModule, device=torch.device("cuda"), rank_gates=[])
    module.base = mock.Mock(dtype=torch.bfloat16, timer=StageTimer())
    module.optimization = mock.Mock(grad_norm=torch.ones(()))
    outputs = {"losses": torch.ones(1), "tokens": 1}
    trainer = mock.Mock(global_step=0, world_size=1, is_global_zero=True, log_every_n_steps=1, loggers=[])
    trainer.train_dataloader.waited = 0.0
    callback, peaks = metrics.Metrics(str(tmp_path)), []
    callback.on_train_start(trainer, module)
    for size in (1e9, 3e9, 2e9):
        allocator.take(7e10)
        callback.on_train_batch_start(trainer, module, None, 0)
        allocator.take(size)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, outputs, mock.Mock(keys=["a"]), 0)
        peaks.append(callback.latest["peak_memory_gb"])
    callback.teardown(trainer, module, "fit")
    assert peaks == [1, 3, 3]


@pytest.mark.slow
def test_waiting_for_data_is_logged(run, tiny, pairs, tmp_path, monkeypatch):
    """One loader takes half a second per batch; the other is ready while the steps take as long."""
    from datamodules.shards.reader import LatentReader

    shares = []
    for slow, method in ((EditModule, "training_step"), (LatentReader, "__call__")):
        folder = tmp_path / method
        at_once = getattr(slow, method)
        monkeypatch.setattr(slow, method, lambda *args, act=at_once: time.sleep(0.5) or act(*args))
        run("train", *short(tiny, pairs, folder, 3), "save_every=0")
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        shares.append(float(rows[-1]["data_wait"]))
        monkeypatch.setattr(slow, method, at_once)
    assert shares[0] < 0.3
    assert shares[1] > 0.6


def test_feed_passes_errors_of_the_loader_on():
    def broken():
        yield from ()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        next(iter(Prefetcher(broken(), torch.device("cpu"))))
