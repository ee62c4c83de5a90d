"""Offloaded activations: the same bits, and nothing of them on the device between forward and backward pass."""

import pytest
import torch
from torch import nn

from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from lightning_modules.execution.offload import ActivationOffload, all_weights
from tests.support.steps import assert_same, made, step

CPU = torch.device("cpu")


class Counted(ActivationOffload):
    """Counts its copies to host memory and back, and how often a saved tensor stays on the device."""

    def __init__(self, module):
        super().__init__(CPU, all_weights(module), least=0)
        self.stayed, self.sent, self.back = [], 0, 0

    def _pack(self, tensor):
        known = len(self._sent)
        packed = super()._pack(tensor)
        self.sent += len(self._sent) - known
        if isinstance(packed, torch.Tensor):
            self.stayed.append(packed)
        return packed

    def _unpack(self, packed):
        self.back += isinstance(packed, tuple)
        return super()._unpack(packed)


@pytest.mark.filterwarnings("error:A saved_tensors_hooks context")  # kept attention would stay on the device
def test_offloaded_activations_give_the_same_bits(tiny):
    """Tested with every checkpointing policy, and after any previous step; weights stay on the device."""
    settings = ["model.offload.activations=true", "adapter.target_modules=all-linear"]
    module = made(tiny, "tlora", "int8_w8a8", *settings)
    assert isinstance(module.execution.saved_tensors(), ActivationOffload)
    plain, velocity = step(module), module.velocity
    weights = {weight.data_ptr() for weight in all_weights(module.transformer)}
    for position in (*POLICIES, "none"):
        set_checkpointing(module.transformer, position, module.execution.recomputed)
        counted = Counted(module.transformer)

        def offloaded(*args, counted=counted):
            with counted:
                return velocity(*args)

        module.velocity = offloaded
        assert_same(step(module), plain)
        assert counted.back >= counted.sent > 10
        assert {tensor.data_ptr() for tensor in counted.stayed} <= weights
        assert not counted._sent


def test_tensor_is_sent_once_and_kept_as_it_was_at_each_use():
    """The operations are the sine of x, the cosine of 2x in the same memory, and its square twice."""
    x = torch.randn(50, requires_grad=True)
    counted = Counted(nn.Module())
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), counted:
        y = x * 1
        one = y.sin()
        y = y.mul_(2)
        two = y.cos() + y.sin()
    (one + two).sum().backward()
    assert (counted.sent, counted.back) == (2, 3)
    torch.testing.assert_close(x.grad, x.cos() + 2 * ((2 * x).cos() - (2 * x).sin()))
