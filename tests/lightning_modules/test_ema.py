"""The averages themselves, against the closed form."""

import math

import pytest
import torch
from torch import nn

from foundation.errors import UserError
from lightning_modules.ema import EMA, RAMP_UP


def weights_of(ema, history, batches):
    """Return the average after steps with these sample counts to these values."""
    parameter = nn.Parameter(torch.tensor([float(history[0])]))
    ema.start({"a": parameter})
    for value, samples in zip(history[1:], batches, strict=True):
        parameter.data.fill_(value)
        for _ in range(samples):
            ema.note(1)
        ema.after_step(torch.tensor(True))
    with ema.averages_in_place():
        return parameter.item()


def test_average_weights_values_by_the_samples_since():
    """Batches have different sizes; the half-life grows up to its setting."""
    history, batches, half_life = [3.0, -1.0, 4.0, 1.5, -9.0, 2.6], [4, 1, 7, 30, 8], 2.5
    seen = [sum(batches[: n + 1]) for n in range(len(batches))]
    assert RAMP_UP * seen[2] < half_life < RAMP_UP * seen[3]
    decays = [0.5 ** (n / min(half_life, RAMP_UP * total)) for n, total in zip(batches, seen, strict=True)]
    shares = [math.prod(decays)]
    shares += [(1 - decay) * math.prod(decays[n + 1 :]) for n, decay in enumerate(decays)]
    assert sum(shares) == pytest.approx(1)
    expected = sum(share * value for share, value in zip(shares, history, strict=True))
    assert weights_of(EMA(half_life, "ema"), history, batches) == pytest.approx(expected, rel=1e-6)


def test_start_is_a_power_function_of_the_samples():
    """Whose relative standard deviation is 0.10, by the formula of arXiv 2312.02696."""
    power = math.log(2) / RAMP_UP - 1
    assert math.sqrt((power + 1) / (power + 2) ** 2 / (power + 3)) == pytest.approx(0.10, abs=0.003)
    average = weights_of(EMA(1e9, "ema"), list(range(2001)), [1] * 2000)
    assert average / 2000 == pytest.approx((power + 1) / (power + 2), rel=1e-3)


def test_skipped_step_moves_nothing_and_does_not_count():
    """The skipped step may be the first one, or within an accumulation window."""
    averages = []
    for left_out in (False, True):
        ema, parameter = EMA(2, "ema"), nn.Parameter(torch.tensor([1.0]))
        ema.start({"a": parameter})
        for value in (5.0, 2.0, 7.0):
            if left_out:
                ema.note(64)
                ema.after_step(torch.tensor(False))
            parameter.data.fill_(value)
            ema.note(8)
            ema.after_step(torch.tensor(True))
        with ema.averages_in_place():
            averages.append(parameter.item())
    assert averages[0] == averages[1]


def test_parameters_come_back_bit_for_bit_also_after_an_error():
    parameters = {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(7))}
    ema = EMA(10, "ema")
    ema.start(parameters)
    for parameter in parameters.values():
        parameter.data += torch.rand_like(parameter)
    ema.note(1)
    ema.after_step(torch.tensor(True))
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    state: dict = {}
    ema.save(state)
    averages = {name: average.clone() for name, average in state["ema"]["weights"].items()}
    with ema.averages_in_place():
        assert ema.in_use
        assert all(torch.equal(parameters[name], averages[name]) for name in parameters)
    with pytest.raises(KeyError), ema.averages_in_place():
        raise KeyError
    assert not ema.in_use
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)
    ema.save(state)
    assert all(torch.equal(state["ema"]["weights"][name], averages[name]) for name in parameters)


def test_sample_with_is_one_of_two_words():
    with pytest.raises(UserError, match=r"ema\.sample_with=both: choose ema or raw"):
        EMA(None, "both")
