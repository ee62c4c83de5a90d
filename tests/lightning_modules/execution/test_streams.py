"""Streamed blocks on streams of their own: the same bits, and in a defined order by PyTorch's own sanitizer."""

import gc
import traceback
import weakref
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_modules.execution import offload
from lightning_modules.execution.offload import HostMemory, SideStream
from tests.support.steps import assert_same, made, step
from tests.support.tiny_adapters import velocity

# They are slow, and nobody reads them here.
NO_TRACES = SimpleNamespace(
    walk_stack=lambda _: None, StackSummary=SimpleNamespace(extract=lambda *_, **__: traceback.StackSummary())
)


def storages(*values):
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Stream:
    def __init__(self, handler, number, numbers):
        self.handler, self.number, self.numbers = handler, number, numbers

    def record_event(self):
        event = next(self.numbers)
        self.handler._handle_event_record(event, self.number)
        return event

    def wait_event(self, event):
        self.handler._handle_event_wait(event, self.number)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Streams(TorchDispatchMode):
    """Everything runs at once; from the events alone, the sanitizer finds what two streams may do in either order.

    Letting memory go is writing it, for what computes next may get it; but not while `record_stream` keeps it, and
    PyTorch keeps pinned memory until its copies are done.
    """

    def __init__(self, side_stream=SideStream):
        super().__init__()
        self.handler, self.numbers = _sanitizer.EventHandler(), count(1)
        self.default = self.current = Stream(self.handler, _sanitizer.DEFAULT_STREAM_ID, self.numbers)
        self.side_stream, self.copies = side_stream, 0
        self.known, self.kept, self.pinned, self.errors = set(), {}, set(), []

    def __enter__(self):
        self.patches = ExitStack()
        for owner, name, value in [
            (torch.cuda, "current_stream", lambda _: self.default),
            (torch.cuda, "stream", self.on),
            (Tensor, "record_stream", lambda tensor, stream: self.keep(tensor, stream)),
            (HostMemory, "pin", lambda memory, _: self.pinned.update(map(self.know, storages(memory.piece)))),
            (_sanitizer, "traceback", NO_TRACES),
            (offload, "SideStream", self.made),
        ]:
            self.patches.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()
        if error[0] is None:
            self.check()

    def check(self):
        errors, self.errors = self.errors, []
        if errors:
            raise _sanitizer.CUDASanitizerErrors(errors)

    def made(self, device):
        side = self.side_stream(device)
        side._stream = Stream(self.handler, next(self.numbers), self.numbers)
        return side

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def know(self, storage):
        """Return the id by which the sanitizer knows a tensor until it is freed."""
        number = storage._cdata
        if number not in self.known:
            self.known.add(number)
            weakref.finalize(storage, self.let_go, number).atexit = False
        return number

    def keep(self, tensor, stream):
        self.kept.setdefault(self.know(tensor.untyped_storage()), set()).add(stream.number)

    def let_go(self, number):
        kept = self.kept.pop(number, set())
        errors = self.handler._handle_kernel_launch(0, set(), {number}, set(), "let go", {number: []})
        if number not in self.pinned:
            self.errors += [error for error in errors if error.previous_access.stream not in kept]
        self.known.discard(number)
        self.pinned.discard(number)
        self.handler._handle_memory_deallocation(number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        self.copies += self.current is not self.default
        pinned = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        read, written = [], []
        for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            if alias is None and not _sanitizer.FACTORY_FUNCTION_REGEX.match(func._opname):
                read += storages(value)
            elif alias is not None and alias.is_write:
                written += storages(value)
        old = {storage._cdata for storage in storages(args, kwargs)}
        made = [storage for storage in storages(out) if storage._cdata not in old]
        writes = set(map(self.know, written + made))
        reads = set(map(self.know, read)) - writes
        aliases = {number: [] for number in reads | writes}
        launched = self.current.number, reads, writes, set(), func.name(), aliases
        self.errors += self.handler._handle_kernel_launch(*launched)
        self.check()
        if pinned:
            self.pinned.update(map(self.know, made))
        return out


def offloading(tiny, adapter, base):
    return made(tiny, adapter, base, "model.gradient_checkpointing=full", "model.offload.blocks=4")


def test_steps_on_streams_have_the_same_bits(tiny):
    """Four blocks take turns in two buffers."""
    plain = step(made(tiny, "tlora", "int8_w8a8"))
    with Streams() as streams:
        module = offloading(tiny, "tlora", "int8_w8a8")
        for _ in range(2):
            assert_same(step(module), plain)
        assert streams.copies >= 4


def image(module):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return velocity(module, [0.2, 0.7])


def test_images_on_streams_have_the_same_bits(tiny):
    """Blocks cycle through the buffers if there are no gradients."""
    expected = image(made(tiny, "lora", "bf16"))
    with Streams():
        module = offloading(tiny, "lora", "bf16")
        assert all(torch.equal(image(module), expected) for _ in range(3))


def test_model_may_be_freed_during_a_copy_of_a_block(tiny):
    """Its first block is being copied for the next image."""
    with Streams():
        module = offloading(tiny, "lora", "bf16")
        image(module)
        del module
        gc.collect()


class NoWait(SideStream):
    def wait(self, copied):
        pass


def test_event_that_is_left_out_is_found(tiny):
    with pytest.raises(_sanitizer.CUDASanitizerErrors), Streams(NoWait):
        step(offloading(tiny, "lora", "bf16"))
