"""A model of CUDA's streams on the CPU: what is copied beside the computing comes as late as it may, or at any moment
before; and PyTorch's own sanitizer says where nothing puts two streams in order.
"""

import random
import traceback
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_modules.execution import offload
from lightning_modules.execution.offload import HostMemory, SideStream

COPY = torch.ops.aten.copy_.default
# They are slow, and nobody reads them here.
NO_TRACES = SimpleNamespace(
    walk_stack=lambda _: None, StackSummary=SimpleNamespace(extract=lambda *_, **__: traceback.StackSummary())
)


def _storages(*values):
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided]


class Stream:
    """What production does with one. On the default stream all is computed at once; other streams wait."""

    def __init__(self, model, number):
        self.model, self.number = model, number
        self.waiting = deque()  # copies, in the order in which they were asked for
        self.asked = 0

    def record_event(self):
        event = SimpleNamespace(stream=self, number=self.model.new_number(), asked=self.asked)
        self.model.handler._handle_event_record(event.number, self.number)
        return event

    def wait_event(self, event):
        self.model.handler._handle_event_wait(event.number, self.number)
        event.stream.advance(event.asked)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def advance(self, number):
        """Do what was asked for until then."""
        while self.waiting and self.waiting[0][0] <= number:
            _, source, target = self.waiting.popleft()
            with self.model.unseen():
                if (memory := target()) is not None and (content := source()) is not None:
                    memory.copy_(content)


class Streams(TorchDispatchMode):
    """Inside, `SideStream` has streams of this model, which knows all that is computed.

    A copy on such a stream has its values when it is waited for and not before, or from some moment on that a seed
    chooses; until then the target is not a number. Which stream reads and writes what goes to PyTorch's sanitizer. By
    the events alone, whatever the moments, it finds what two streams may do in either order. Letting memory go is
    writing it, for what computes next may get it; but not while `record_stream` keeps it.

    Args:
        seed: None for the last moment.
        side_stream: what production uses; a class that leaves out what it should not.

    Attributes:
        copies: how many were asked for.
    """

    def __init__(self, seed=None, side_stream=SideStream):
        super().__init__()
        self.handler = _sanitizer.EventHandler()
        self.default = self._current = Stream(self, _sanitizer.DEFAULT_STREAM_ID)
        self.streams = []
        self.copies = self._numbers = 0
        self._side_stream = side_stream
        self._random = None if seed is None else random.Random(seed)
        self._seen = True
        self._known, self._kept, self._pinned = set(), {}, set()
        self._errors = []

    def new_number(self):
        self._numbers += 1
        return self._numbers

    def __enter__(self):
        self._patches = ExitStack()
        replaced = [
            (torch.cuda, "current_stream", lambda _: self.default),
            (torch.cuda, "stream", self._on),
            (Tensor, "record_stream", lambda tensor, stream: self._keep(tensor, stream)),
            (HostMemory, "pin", lambda memory, _: self._pinned.update(map(self._know, _storages(memory.piece)))),
            (_sanitizer, "traceback", NO_TRACES),
            (offload, "SideStream", self._made),
        ]
        for owner, name, value in replaced:
            self._patches.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()
        if error[0] is None:
            self._raise()

    def _made(self, device):
        side = self._side_stream(device)
        side._stream = Stream(self, self.new_number())
        self.streams.append(side._stream)
        return side

    @contextmanager
    def _on(self, stream):
        before, self._current = self._current, stream or self._current
        yield
        self._current = before

    @contextmanager
    def unseen(self):
        before, self._seen = self._seen, False
        with torch.no_grad():
            yield
        self._seen = before

    def _know(self, storage):
        """Return the id by which the sanitizer knows a tensor until it is freed."""
        number = storage._cdata
        if number not in self._known:
            self._known.add(number)
            weakref.finalize(storage, self._let_go, number).atexit = False
        return number

    def _keep(self, tensor, stream):
        self._kept.setdefault(self._know(tensor.untyped_storage()), set()).add(stream.number)

    def _let_go(self, number):
        """Memory of the host is kept by PyTorch until its copies are done."""
        kept = self._kept.pop(number, set())
        errors = self.handler._handle_kernel_launch(0, set(), {number}, set(), "let go", {number: []})
        if number not in self._pinned:
            self._errors += [error for error in errors if error.previous_access.stream not in kept]
        self._known.discard(number)
        self._pinned.discard(number)
        self.handler._handle_memory_deallocation(number)

    def _raise(self):
        errors, self._errors = self._errors, []
        if errors:
            raise _sanitizer.CUDASanitizerErrors(errors)

    def _launch(self, stream, name, read, written):
        written = set(map(self._know, written))
        read = set(map(self._know, read)) - written
        aliases = {number: [] for number in read | written}
        self._errors += self.handler._handle_kernel_launch(stream.number, read, written, set(), name, aliases)
        self._raise()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not self._seen:
            return func(*args, **kwargs)
        if self._current is not self.default:
            assert func is COPY
            return self._ask(*args[:2])
        for stream in self.streams if self._random else ():
            if stream.waiting and self._random.random() < 0.1:
                stream.advance(stream.waiting[0][0])
        pinned = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        read, written = [], []
        for argument, value in _sanitizer.zip_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            if alias is None and not _sanitizer.FACTORY_FUNCTION_REGEX.match(func._opname):
                read += _storages(value)
            elif alias is not None and alias.is_write:
                written += _storages(value)
        old = {storage._cdata for storage in _storages(args, kwargs)}
        made = [storage for storage in _storages(out) if storage._cdata not in old]
        self._launch(self.default, func.name(), read, written + made)
        if pinned:
            self._pinned.update(map(self._know, made))
        return out

    def _ask(self, target, source):
        stream = self._current
        self._launch(stream, "copy", _storages(source), _storages(target))
        with self.unseen():
            target.fill_(float("nan") if target.is_floating_point() else 255)
        self.copies += 1
        stream.asked += 1
        stream.waiting.append((stream.asked, self._loosely(source), self._loosely(target)))
        return target

    def _loosely(self, tensor):
        """Return the tensor while its memory is in use."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._pinned or storage._cdata in self._kept:
            return lambda: tensor
        place, dtype = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.dtype
        memory = weakref.ref(storage)
        return lambda: None if memory() is None else torch.empty(0, dtype=dtype).set_(memory(), *place)
