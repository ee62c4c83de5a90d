"""A GPU without one: the real code on fake tensors of CUDA, beside real ones of the host."""

import heapq
import sys
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from unittest import mock

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_modules.adapters import rank_schedule
from lightning_modules.execution import offload
from lightning_modules.quantization import eight_bit, linear

DEVICE = torch.device("cuda", 0)
# PyTorch's default while a module is configured, as under Lightning; but another one, that nothing may follow.
FOREIGN = torch.device("cuda", 1)

# What makes tensors on the host in a step, by design; any other that does is a finding.
ON_HOST = {
    ("flow.py", "sample_noise"): "drawn by generators of the host, the same on any device",
    ("flow.py", "draw"): "drawn by generators of the host, the same on any device",
    ("flow.py", "shift_time"): "of what was drawn there",
    ("batch.py", "copy_to"): "pinned, for a copy that nobody waits for",
    ("patches.py", "padding_mask"): "masks of prompts stay on the host, and are asked whether they mask",
    ("denoise.py", "real_tokens"): "masks of prompts stay on the host, and are asked for lengths",
    ("denoise.py", "joint_sequence"): "where text and images are is known on the host",
    ("offload.py", "_pack"): "activations that wait there",
}
# What makes tensors on the host and waits for their copies: constants of the first step, but for the last two.
WAITS = {
    ("rank_schedule.py", "_thresholds"),
    ("module.py", "_channels"),
    ("weights.py", "map"),  # of the autoencoder's statistics
    ("module.py", "_mean_and_std"),
    ("transformer_z_image.py", "precompute_freqs_cis"),
    ("transformer_z_image.py", "__call__"),  # of its positions
    ("transformer_qwenimage.py", "forward"),  # diffusers makes a list of 2511's tokens
    ("transformer_qwenimage.py", "compute_text_seq_len_from_mask"),  # in padded batches, a length that nothing reads
}

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default


def _place():
    """Return the file and function that called PyTorch."""
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    code = frame.f_code
    return code.co_filename.rpartition("/")[2], code.co_qualname.partition(".<locals>")[0].rpartition(".")[2]


class FakeCuda(TorchDispatchMode):
    """A fake GPU: tensors on CUDA have no content; those in CPU memory are real.

    Mixing the two is PyTorch's own error, and so is reading a number back.

    Attributes:
        found: counts of operations that a GPU would not allow or that are slow, by kind and place.
        attended: how many kernels of attention were called, all in bf16 unless found.
        called: the names of all operators.
        allowed: each of `ON_HOST` that made a tensor there.
    """

    def __init__(self):
        super().__init__()
        self.found, self.attended, self.allowed, self.called = Counter(), 0, set(), set()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._in_step = False
        self._pinned = {}

    @contextmanager
    def configuring(self):
        """Temporarily set the state in which Lightning configures a module."""
        with self._fake, self, FOREIGN:
            yield

    @contextmanager
    def step(self):
        """Temporarily set the state of a bf16 training step; autocast is the caller's."""
        self._in_step = True
        with self._fake, self:
            yield
        self._in_step = False

    def pin(self, tensor):
        """Note that a CPU tensor is in pinned memory."""
        reference = StorageWeakRef(tensor.untyped_storage())  # by which its number stays its own
        self._pinned[reference.cdata] = reference
        return tensor

    def note(self, what):
        self.found[what, *_place()] += 1

    def attend(self, query, key, value, *args, attend=F.scaled_dot_product_attention, **kwargs):
        """PyTorch's attention, that looks at what it gets before autocast does."""
        self.attended += 1
        if (dtypes := {query.dtype, key.dtype, value.dtype}) != {torch.bfloat16}:
            self.note(f"attention of {dtypes}")
        return attend(query, key, value, *args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # asked by C++ for each tensor
            return args[0].fake_device if hasattr(args[0], "fake_device") else func(*args)
        kwargs = dict(kwargs or {})
        self.called.add(func.name())
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pinned = kwargs.pop("pin_memory", None)
        on_device = any(tensor.is_cuda for tensor in given)
        device = kwargs.get("device")
        if on_device or (device is not None and torch.device(device).type == "cuda"):
            out = func(*args, **kwargs)
        else:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if pinned:
                self.pin(tensor)
            self._judge(func, args, kwargs, given, on_device, tensor)
        return out

    def _judge(self, func, args, kwargs, given, on_device, tensor):
        if tensor.device == FOREIGN:
            self.note(f"{func} follows the default device")
        if not self._in_step:
            return
        copies = func in (aten._to_copy.default, aten.copy_.default)
        apart = kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,))
        if not tensor.is_cuda:
            place = _place()
            self.allowed.add(place)
            reads = on_device and func is not aten.empty_like.default
            if reads and not (copies and apart):
                self.note(f"{func} reads from the device")
            elif not reads and place not in ON_HOST and place not in WAITS:
                self.note(f"{func} makes a tensor on the host")
        elif copies and (host := [one for one in given if not one.is_cuda]) and _place() not in WAITS:
            if not apart:
                self.note("a copy from the host waits")
            if not all(one.untyped_storage()._cdata in self._pinned for one in host):
                self.note("a copy from memory that is not pinned waits")


def backward(loss):
    """Run the backward pass like autograd's engine, which would query CUDA: nodes in order, the latest first."""
    order = count()
    given = {loss.grad_fn: {0: torch.ones_like(loss)}}
    waiting = [(-loss.grad_fn._sequence_nr(), next(order), loss.grad_fn)]
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", return_value=0):
        while waiting:
            *_, node = heapq.heappop(waiting)
            gradients = given.pop(node)
            inputs = [_fitting(gradients.get(n), one) for n, one in enumerate(node._input_metadata)]
            outputs = getattr(node, "apply", node)(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            # What follows the tensors among a Python function's inputs is nothing.
            for (following, number), gradient in zip(node.next_functions, outputs, strict=False):
                if following is None or gradient is None:
                    continue
                if hasattr(following, "variable"):
                    following(_fitting(gradient, following._input_metadata[0]))
                    continue
                if following not in given:
                    given[following] = {}
                    heapq.heappush(waiting, (-following._sequence_nr(), next(order), following))
                before = given[following].get(number)
                given[following][number] = gradient if before is None else before + gradient


def _fitting(gradient, metadata):
    """Return a gradient in the form that the engine passes to a node."""
    if gradient is None:
        return None
    assert gradient.device == metadata.device
    return gradient.sum_to_size(metadata.shape).to(metadata.dtype)


def swap_tensors(one, other, swap=torch.utils.swap_tensors):
    """PyTorch's, which refuses fake tensors that anybody remembers, as FakeTensorMode does."""
    with mock.patch.object(weakref, "getweakrefs", return_value=[]):
        swap(one, other)


@contextmanager
def fake_cuda():
    """A `FakeCuda` of compute capability 8.9, beside which nothing is CUDA's own; cuDNN would need a driver."""
    cuda, stream = FakeCuda(), mock.Mock()
    replaced = [
        (F, "scaled_dot_product_attention", cuda.attend),
        (torch.cuda, "get_device_capability", lambda device: (8, 9)),
        (torch.cuda, "is_bf16_supported", lambda: True),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "Stream", lambda device: stream),
        (torch.cuda, "current_stream", lambda device: stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (Tensor, "record_stream", lambda *_: None),
        (Tensor, "pin_memory", lambda tensor: cuda.pin(tensor.clone())),
        (offload, "_register", lambda memory, device: cuda.pin(memory)),
        (offload, "_unpin", lambda *_: None),
        (linear, "FUSES", {}),
        (eight_bit, "available", lambda device: False),  # Triton wants addresses
        (eight_bit, "product_available", lambda device: False),
        (bnb.nn, "Params4bit", lambda data, **_: torch.nn.Parameter(data, requires_grad=False)),
        (torch.utils, "swap_tensors", swap_tensors),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        for cached in (eight_bit._probe, rank_schedule._thresholds):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield cuda
