"""model.gradient_checkpointing=auto: raised step by step, on memory that a double counts."""

import random
import re

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.strategies import SingleDeviceStrategy

from callbacks import checkpointing as checkpointing_callback
from lightning_modules.estimation import memory
from lightning_modules.estimation.memory import USABLE, Calibration
from lightning_modules.execution import checkpointing
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.prepare import Execution
from tests.support.commands import compose, lora_bytes, short

NEEDS = {"none": 480 * 10**8, "selective": 320 * 10**8, "every_2": 260 * 10**8, "full": 46 * 10**8}


def raised(taken, free, needs=NEEDS, tokens=1000):
    """Return the policies of the first steps with equal numbers of tokens; `taken` returns the memory of a step."""
    calibration, tried = Calibration(needs, 1000), []
    while not calibration.is_done:
        tried.append(calibration.policy)
        calibration.after_step(calibration.excess(taken(calibration.policy, tokens), tokens), free)
    return tried, calibration


@pytest.mark.parametrize("tokens", [1000, 300])
def test_no_step_takes_more_than_there_is_and_the_last_policy_is_the_least_that_fits(tokens):
    """Whatever the estimate is off by; smaller batches come first, the heaviest may come any time."""
    generator = random.Random(0)
    for _ in range(200):
        factor, free = generator.uniform(0.6, 1.6), 1e8 * generator.uniform(80, 900)
        tried, done = raised(lambda policy, count, f=factor: f * NEEDS[policy] * count / 1000, free, tokens=tokens)
        assert tried == list(POLICIES[::-1])[: len(tried)]
        for policy in tried:
            assert factor * NEEDS[policy] <= free
        fitting = [policy for policy in POLICIES if max(1, factor) * NEEDS[policy] <= USABLE * free]
        assert done.policy == tried[-1] == (fitting[0] if fitting else "full")


class Double:
    """The memory of a device, on which a step takes so many times what was estimated."""

    def __init__(self, free, times, peaks, chosen):
        self._free, self._times, self._peaks, self._chosen = free, times, peaks, chosen
        self._counts = False

    def restart(self):
        self._counts = True

    def taken(self):
        assert self._counts
        self._counts = False  # what comes later is none of the step's
        return self._times * self._peaks[self._chosen[-1]]

    def free(self):
        return self._free


@pytest.mark.slow
def test_runs_are_the_same_bits_whatever_is_chosen(run, tiny, pairs, tmp_path, monkeypatch):
    """Cases: no memory left, just enough for each policy, steps that take more, another process with less."""
    peaks, weights, chosen = {}, {}, []
    peak, of_blocks = memory.FakeStep.peak, checkpointing.set_checkpointing
    reduce = SingleDeviceStrategy.reduce
    monkeypatch.setattr(memory.FakeStep, "peak", lambda step, p: peaks.setdefault(p, peak(step, p)))
    monkeypatch.setattr(Execution, "searches_checkpointing", True)
    monkeypatch.setattr(
        "lightning_modules.prepare.set_checkpointing", lambda *args: chosen.append(args[1]) or of_blocks(*args)
    )

    def with_room_for(free, times=1, other=(0, -1e12)):
        monkeypatch.setattr(checkpointing_callback, "DeviceMemory", lambda _: Double(free, times, peaks, chosen))
        monkeypatch.setattr(
            SingleDeviceStrategy,
            "reduce",
            lambda self, x, *a, reduce_op="mean", **k: (
                torch.maximum(x, torch.tensor(other, dtype=x.dtype))
                if reduce_op == "max" and x.ndim
                else reduce(self, x, *a, reduce_op=reduce_op, **k)
            ),
        )
        chosen.clear()
        folder = tmp_path / str(len(weights))
        text = run("train", *short(tiny, pairs, folder, 6), "model.gradient_checkpointing=auto").text
        weights[folder] = lora_bytes(folder)
        assert chosen == list(POLICIES[::-1])[: len(chosen)]
        assert re.search(r"gradient_checkpointing=auto is (\w+): ", text)[1] == chosen[-1]
        return chosen[-1]

    assert with_room_for(0) == "full"
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    rooms = {policy: int(size / USABLE) + 2 for policy, size in peaks.items()}
    for policy in ("every_2", "none"):
        assert with_room_for(rooms[policy]) == policy
    assert with_room_for(rooms["none"], times=1.5) != "none"
    assert with_room_for(rooms["none"], other=(0, -rooms["every_2"])) == "every_2"
    assert with_room_for(rooms["none"], other=(1.5, -1e12)) != "none"
    run("train", *short(tiny, pairs, tmp_path / "none", 6), "model.gradient_checkpointing=none")
    assert {*weights.values()} == {lora_bytes(tmp_path / "none")}


def test_run_whose_estimate_fails_goes_on_with_full_checkpointing(run, tiny, pairs, tmp_path, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no fake of this operator")

    monkeypatch.setattr(Execution, "searches_checkpointing", True)
    monkeypatch.setattr(memory.FakeStep, "peak", fail)
    text = run("train", *short(tiny, pairs, tmp_path / "run", 2), "model.gradient_checkpointing=auto").text
    assert "no estimate for gradient_checkpointing=auto, which stays full: no fake of this operator" in text


@pytest.mark.parametrize(
    ("device", "settings", "raises"),
    [
        ("cuda", [], True),
        ("cpu", [], False),
        ("cuda", ["model.gradient_checkpointing=selective"], False),
        ("cuda", ["model.offload.blocks=2"], False),
        ("cuda", ["model.offload.activations=true"], False),
    ],
)
def test_runs_on_a_gpu_raise_it_if_nothing_waits_on_the_host(tiny, device, settings, raises):
    cfg = compose("train", "model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", *settings)
    module = instantiate(cfg.model, _convert_="all")
    module.base._device = lambda: torch.device(device)
    module.execution.check(sharded=False)
    assert module.execution.searches_checkpointing is raises
