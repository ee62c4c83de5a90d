"""Nothing waits: neither a step for the device, nor the trainer for data without saying so."""

import csv
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from callbacks import metrics
from datamodules.prefetch import Feed
from lightning_modules.edit_module import EditModule
from tests.conftest import short
from tests.support.tiny_pipelines import MODELS

# Methods that give the host a number or a copy.
READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__contains__",
    "__format__",
)
# Operators whose result's shape the host must know, or that read a number.
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class _Marks:
    """Which tensors would be on a device: what stems from weights or from a batch that was copied there."""

    def __init__(self):
        self.storages = set()

    def add(self, *tensors):
        self.storages |= {tensor.untyped_storage()._cdata for tensor in tensors}
        self.kept = [*getattr(self, "kept", []), *tensors]  # or their places would be another's

    def __contains__(self, tensor):
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self.storages


class _Operators(TorchDispatchMode):
    def __init__(self, marks, found):
        super().__init__()
        self.marks, self.found = marks, found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        on_device = any(leaf in self.marks for leaf in tree_leaves((args, kwargs)))
        if on_device and any(name in func.name() for name in SYNCHRONIZING):
            self.found.append(func.name())
        result = func(*args, **(kwargs or {}))
        if on_device:
            self.marks.add(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, marks, found):
        super().__init__()
        self.marks, self.found = marks, found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, rest = getattr(func, "__name__", ""), [*args[1:], *(kwargs or {}).values()]
        if args and args[0] in self.marks:
            if name in READS or (name == "to" and "cpu" in [one for one in rest if isinstance(one, str)]):
                self.found.append(name)
        elif name == "to" and not kwargs.get("non_blocking") and any(isinstance(one, torch.device) for one in rest):
            self.found.append("to of a tensor of the host")
        result = func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device) and isinstance(result, torch.Tensor):
            if name == "tensor":
                self.found.append("numbers of the host")
            self.marks.add(result)  # made there
        return result


class Watch(Callback):
    """Looks for what would wait for a device, from a step's start to its end; here on a CPU, where nothing does."""

    def __init__(self):
        self.found = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begin(trainer.global_step + 1, *pl_module.parameters(), *batch.tensors())

    def begin(self, step, *tensors):
        self.step = step
        found = self.found[step] = []
        self.marks = _Marks()
        self.marks.add(*tensors)
        self._modes = [_Operators(self.marks, found), _Methods(self.marks, found)]
        for mode in self._modes:
            mode.__enter__()

    def end(self):
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)


@pytest.fixture
def watch(monkeypatch):
    """A watch over each step of the runs that follow, to the end of all that is called at its end."""
    watch = Watch()
    init, end = Trainer.__init__, EditModule.on_train_batch_end

    def with_watch(self, *args, callbacks=(), **kwargs):
        init(self, *args, callbacks=[*callbacks, watch], **kwargs)

    def then_end(self, *args):
        end(self, *args)
        watch.end()

    monkeypatch.setattr(Trainer, "__init__", with_watch)
    monkeypatch.setattr(EditModule, "on_train_batch_end", then_end)
    return watch


SETTINGS = ["trainer.log_every_n_steps=4", "save_every=0", "data.batch_size=2", "data.caption_dropout_rate=0.3"]


@pytest.mark.parametrize(
    "more",
    [
        ["adapter=lora"],
        ["adapter=tlora", "model.gradient_checkpointing=selective"],
        ["adapter=tlora", "adapter.update_masked=false", "model.dtype=bfloat16", "model/quantization=fp8"],
        [
            "trainer.accumulate_grad_batches=2",
            "model.offload.activations=true",
            "+trainer.gradient_clip_algorithm=value",
        ],
    ],
)
def test_no_step_waits_for_the_device_between_two_readings(run, tiny, pairs, tmp_path, watch, more):
    run(
        "train", *short(tiny, pairs, tmp_path / "run", 8), "data=cached", f"data.cache_dir={tmp_path}", *SETTINGS, *more
    )
    assert list(watch.found) == list(range(1, 9))
    waits = {step for step, found in watch.found.items() if found}
    assert waits == {1, 4, 8}, watch.found


@pytest.mark.parametrize("model", MODELS)
def test_no_family_waits_for_the_device(run, arguments, tmp_path, watch, model):
    run("train", *arguments(model, tmp_path / "run", 3, "trainer.log_every_n_steps=3", "data.batch_size=2"))
    # diffusers' transformer of Qwen-Image-Edit-2511 makes a list of its tokens' kinds in each forward.
    expected = ["numbers of the host"] if model == "qwen_image_edit_plus" else []
    assert watch.found[2] == expected


@pytest.mark.parametrize("waiting", ["item", "cpu", "bool", "to"])
def test_the_watch_sees_what_waits(run, tiny, pairs, tmp_path, watch, monkeypatch, waiting):
    losses = EditModule.losses

    def waits(self, batch):
        result = losses(self, batch)
        if waiting == "to":
            torch.zeros(1).to(result.device)
        else:
            {"item": lambda x: x.item(), "cpu": torch.Tensor.cpu, "bool": bool}[waiting](result.mean())
        return result

    monkeypatch.setattr(EditModule, "losses", waits)
    run("train", *short(tiny, pairs, tmp_path / "run", 3), "data=cached", f"data.cache_dir={tmp_path}", *SETTINGS)
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
    """Not of what was before them, nor of pictures and savings between them."""
    allocator = _Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    monkeypatch.setattr(metrics, "matrix_peak", lambda device, dtype: allocator.take(9e10) or 1e12)
    module = mock.Mock(spec=EditModule, device=torch.device("cuda"), base_dtype=torch.bfloat16, rank_gates=[])
    module.grad_norm = module.batch_loss = torch.ones(())
    module.batch_tokens, module.batch_flops, module.batch_rank, module.stopwatch = 1, 1, None, mock.Mock(seconds={})
    trainer = mock.Mock(global_step=0, world_size=1, is_global_zero=True, log_every_n_steps=1, loggers=[])
    trainer.train_dataloader.waited = 0.0
    callback, peaks = metrics.Metrics(str(tmp_path), 50), []
    callback.on_train_start(trainer, module)
    for size in (1e9, 3e9, 2e9):
        allocator.take(7e10)
        callback.on_train_batch_start(trainer, module, None, 0)
        allocator.take(size)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, mock.Mock(keys=["a"]), 0)
        peaks.append(callback.latest["peak_memory_gb"])
    callback.teardown(trainer, module, "fit")
    assert peaks == [1, 3, 3]


def test_waiting_for_data_is_logged(run, tiny, pairs, tmp_path, monkeypatch):
    """A loader that takes half a second for each batch, and one that is ready."""
    from datamodules.shards.reader import LatentReader

    read = LatentReader.__call__
    shares = []
    for delay in (0.0, 0.5):
        monkeypatch.setattr(LatentReader, "__call__", lambda self, items, s=delay: pause(s) or read(self, items))
        folder = tmp_path / str(delay)
        run("train", *short(tiny, pairs, folder, 3), "data=cached", f"data.cache_dir={tmp_path}", "save_every=0")
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        shares.append(float(rows[-1]["data_wait"]))
        assert all(float(row["tflops"]) > 0 for row in rows)
    assert shares[0] < 0.3
    assert shares[1] > 0.6


def pause(seconds):
    import time

    time.sleep(seconds)


def test_feed_passes_errors_of_the_loader_on():
    def broken():
        yield from ()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        next(iter(Feed(broken(), torch.device("cpu"))))
