"""The parts of the loss against closed forms, gradients included."""

import math

import pytest
import torch
import torch.nn.functional as F

from foundation.errors import UserError
from lightning_modules.objectives.flow_matching import Huber, edit_region

DIFFERENCE = torch.linspace(-3, 3, 32).reshape(2, 1, 4, 4)
T = torch.tensor([0.25, 1.0])


def gradient(loss, t=T):
    x = DIFFERENCE.clone().requires_grad_()
    loss(x, t).sum().backward()
    return x.grad


def test_huber_is_torchs_twice_and_small_errors_count_as_squares():
    loss = Huber(0.7, "constant")
    expected = 2 * F.huber_loss(DIFFERENCE, torch.zeros_like(DIFFERENCE), reduction="none", delta=0.7)
    torch.testing.assert_close(loss(DIFFERENCE, T), expected)
    torch.testing.assert_close(gradient(loss), 2 * DIFFERENCE.clamp(-0.7, 0.7))
    assert torch.equal(loss(0.1 * DIFFERENCE, T), (0.1 * DIFFERENCE).square())


def test_schedule_is_exponential_in_t_and_of_each_sample():
    threshold = Huber(0.1, "exponential").threshold(torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(threshold.flatten(), torch.tensor([1.0, math.sqrt(0.1), 0.1]))
    together = Huber(0.1, "exponential")(DIFFERENCE, T)
    for row, t in enumerate(T.tolist()):
        alone = Huber(0.1**t, "constant")(DIFFERENCE[row : row + 1], T[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)


def pair(side=8, change=2.0):
    """Return latents (1, 2, side, side) that differ at one position."""
    control = torch.randn(1, 2, side, side, generator=torch.Generator().manual_seed(0))
    target = control.clone()
    target[:, :, 2, 3] += change
    return target, control


def test_region_is_the_change_relative_to_the_largest():
    target, control = pair()
    region = edit_region(target, control)
    assert region.shape == (1, 1, 8, 8)
    torch.testing.assert_close(region[0, 0, 1:4, 2:5], torch.ones(3, 3))  # all 9 means contain the changed position
    assert float(region.sum()) == pytest.approx(9)
    target[0, :, 6, 6] += 1.0  # half of the other
    assert float(edit_region(target, control)[0, 0, 6, 6]) == pytest.approx(0.5)
    assert torch.equal(edit_region(control, control), torch.zeros(1, 1, 8, 8))


def test_control_of_another_size_is_compared_at_the_smaller_one():
    target, control = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 4, 4)
    target[:, :, :2, :2] = 1.0
    region = edit_region(target, control)
    assert region.shape == (1, 1, 8, 8)
    assert region[0, 0, 0, 0] == 1
    assert region[0, 0, 5:, 5:].abs().max() == 0
    same = edit_region(target, torch.zeros(1, 1, 16, 16))
    assert same[0, 0, 0, 0] == 1
    assert torch.equal(same > 0, F.max_pool2d(target, 3, 1, 1) > 0)


def test_an_unknown_schedule_is_refused_in_a_line():
    with pytest.raises(UserError, match=r"objective\.loss\.schedule=snr: choose constant or exponential"):
        Huber(1.0, "snr")
