"""Offloaded activations: copied once each way, ahead of their use, and released after it."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_modules.execution import offload
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from lightning_modules.execution.host_memory import SideStream, all_weights
from lightning_modules.execution.offload import ActivationOffload
from tests.support.combinations import first
from tests.support.steps import assert_same, made, step
from tests.support.streams import Streams

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _late():
    with Streams():
        yield


class Counted(ActivationOffload):
    """Counts what it does.

    Attributes:
        kept: how many times a tensor was.
        sent: how many copies went to the host.
        fetched: how many came back.
        ahead: for each use, whether its copy had been asked for.
        bytes: of all that came back.
        most: of these, how many were there at a time.
        leaving: the most tensors that a forward pass had to leave where they were, for their copies.
    """

    def __init__(self, module):
        super().__init__(CPU, all_weights(module), least=0)
        self.start()

    def start(self):
        self.kept = self.sent = self.fetched = self.bytes = self.most = self.leaving = 0
        self.ahead, self._back = [], []

    def left(self):
        """Return the bytes that came back and are still allocated."""
        return sum(size for reference, size in self._back if reference() is not None)

    def _pack(self, tensor):
        packed = super()._pack(tensor)
        self.kept += packed is not tensor
        return packed

    def _send(self, tensor):
        kept = super()._send(tensor)
        self.sent += 1
        self.leaving = max(self.leaving, len(self._leaving))
        return kept

    def _fetch(self, node, references):
        before = len(self._arriving)
        super()._fetch(node, references)
        for _, arriving in list(self._arriving)[before:]:
            self.fetched += len(arriving)
            self._back += [(weakref.ref(kept.back.untyped_storage()), kept.back.nbytes) for kept in arriving]
            self.bytes += sum(kept.back.nbytes for kept in arriving)
        self.most = max(self.most, self.left())

    def _unpack(self, packed):
        if not isinstance(packed, torch.Tensor):
            self.ahead.append(packed[1].back is not None)
        return super()._unpack(packed)


def inside(module, offload):
    """Let a module compute its velocity inside."""
    velocity = module.velocity

    def offloaded(*args):
        with offload:
            return velocity(*args)

    module.velocity = offloaded


@pytest.mark.parametrize(
    ("adapter", "base", "more"),
    first(
        1,
        [
            ("tlora", "fp8", []),
            ("lora", "bf16", ["adapter.target_modules=all-linear"]),
            ("tlora", "bf16", ["adapter.target_modules=all-linear"]),
        ],
    ),
)
def test_offloaded_activations_give_the_same_bits_and_leave_nothing(tiny, adapter, base, more):
    """Tested with every checkpointing policy, and after any previous step."""
    module = made(tiny, adapter, base, "model.offload.activations=true", *more)
    assert isinstance(module.execution.saved_tensors(), ActivationOffload)
    plain = step(module)
    counted = Counted(module.transformer)
    inside(module, counted)
    for position in (*POLICIES, "none"):
        set_checkpointing(module.transformer, position, module.adapter.bind_rank_mask)
        counted.start()
        assert_same(step(module), plain)
        assert counted.fetched == counted.sent > 10
        assert len(counted.ahead) == counted.kept
        assert counted.ahead.count(False) <= 2
        assert counted.left() == 0


class Block(nn.Module):
    """Keeps two tensors where it is checkpointed, ten where it is not, seven different ones."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, scale):
        normed = x * scale
        return x + (self.query(normed) * self.key(normed)).tanh() * self.value(normed), scale + 1


def blocks_step(blocks, checkpointed, offload=None):
    """Return the gradients of consecutive blocks."""
    blocks.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x, scale = (torch.randn(4, 8, generator=generator).requires_grad_() for _ in range(2))
    with offload or nullcontext():
        now = x, scale
        for block in blocks:
            now = checkpoint(block, *now, use_reentrant=False) if checkpointed else block(*now)
        loss = now[0].sum()
    del now
    loss.backward()
    return [x.grad, scale.grad, *(parameter.grad.clone() for parameter in blocks.parameters())]


@pytest.mark.parametrize(("checkpointed", "sent", "kept"), [(True, 2, 2), (False, 7, 10)])
def test_blocks_tensors_come_back_once_ahead_and_go_behind_their_use(checkpointed, sent, kept):
    blocks = nn.ModuleList(Block() for _ in range(10))
    counted = Counted(blocks)
    plain = blocks_step(blocks, checkpointed)
    for _ in range(2):
        counted.start()
        offloaded = blocks_step(blocks, checkpointed, counted)
        assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
        assert (counted.sent, counted.fetched, counted.kept) == (10 * sent, 10 * sent, 10 * kept)
        assert counted.ahead.count(False) <= 2
        assert counted.most <= 0.3 * counted.bytes
        assert counted.leaving <= 2
        assert not counted._leaving
        assert counted.left() == 0


def test_tensor_is_kept_as_it_was_at_each_use(monkeypatch):
    """The operations are the sine of x and the cosine of 2x in the same memory."""
    monkeypatch.setattr(offload, "SideStream", SideStream)  # autograd alone would refuse it
    x = torch.randn(50, requires_grad=True)
    counted = Counted(nn.Module())
    with counted:
        y = x * 1
        one = y.sin()
        two = y.mul_(2).cos()
    (one + two).sum().backward()
    assert counted.sent == 2
    torch.testing.assert_close(x.grad, x.cos() - 2 * (2 * x).sin())


def test_two_forward_passes_before_a_backward_pass_do_not_mix():
    blocks, counted = nn.ModuleList(Block() for _ in range(3)), Counted(nn.Module())
    inputs = torch.randn(2, 4, 8)
    losses = []
    for x in inputs:
        with counted:
            losses.append(sum(block(x, x)[0].square().sum() for block in blocks))
    for x, loss in zip(inputs, losses, strict=True):
        plain = sum(block(x, x)[0].square().sum() for block in blocks)
        expected = torch.autograd.grad(plain, list(blocks.parameters()))
        assert all(map(torch.equal, expected, torch.autograd.grad(loss, list(blocks.parameters()))))


def test_backward_pass_that_fails_leaves_nothing_to_the_next():
    blocks = nn.ModuleList(Block() for _ in range(6))
    counted = Counted(blocks)
    plain = blocks_step(blocks, True)

    def fail(*_):
        raise ArithmeticError

    hook = blocks[3].register_full_backward_hook(fail)
    with pytest.raises(ArithmeticError):
        blocks_step(blocks, True, counted)
    hook.remove()
    counted.start()
    assert all(map(torch.equal, plain, blocks_step(blocks, True, counted)))
    assert counted.left() == 0
