"""model.gradient_checkpointing=auto: raised step by step, on memory that a double counts."""

import random
import re

import pytest
import torch
from hydra.utils import instantiate

from callbacks.checkpointing import RaiseCheckpointing
from lightning_modules.estimation import calibration
from lightning_modules.estimation.calibration import USABLE, Calibration
from lightning_modules.execution import checkpointing
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.prepare import Execution
from tests.support.commands import compose, lora_bytes, short

NEEDS = {"none": 480 * 10**8, "selective": 320 * 10**8, "every_2": 260 * 10**8, "full": 46 * 10**8}


def raised(taken, free, needs=NEEDS, tokens=1000):
    """The policies of the first steps, each of as many tokens; `taken` says what a step takes."""
    calibration, tried = Calibration(needs, 1000), []
    while not calibration.is_done:
        tried.append(calibration.policy)
        calibration.after_step(calibration.share(taken(calibration.policy, tokens), tokens), free)
    return tried, calibration


@pytest.mark.parametrize("tokens", [1000, 300])
def test_no_step_takes_more_than_there_is_and_the_last_policy_is_the_least_that_fits(tokens):
    """Whatever the estimate is off by; smaller batches come first, the heaviest may come any time."""
    generator = random.Random(0)
    for _ in range(1000):
        factor, free = generator.uniform(0.6, 1.6), 1e8 * generator.uniform(80, 900)
        tried, done = raised(lambda policy, count, f=factor: f * NEEDS[policy] * count / 1000, free, tokens=tokens)
        assert tried == list(POLICIES[::-1])[: len(tried)]
        for policy in tried:
            assert factor * NEEDS[policy] <= free
        fitting = [policy for policy in POLICIES if max(1, factor) * NEEDS[policy] <= USABLE * free]
        assert done.policy == tried[-1] == (fitting[0] if fitting else "full")


def test_uncorrected_estimate_would_run_out_of_memory():
    """The same, where nothing is learned from what steps take: so the promise above can be broken."""
    tried, _ = raised(lambda *_: 0, 400 * 10**8)
    assert 1.5 * NEEDS[tried[-1]] > 400 * 10**8


class Double:
    """The memory of a device on which the estimate is right."""

    def __init__(self, free):
        self._free = free

    def restart(self):
        pass

    def taken(self):
        return 0

    def free(self):
        return self._free


def test_runs_are_the_same_bits_whatever_is_chosen(run, tiny, pairs, tmp_path, monkeypatch):
    """With no memory left, and with just enough for each."""
    peaks, weights, chosen = {}, {}, []
    peak, of_blocks = calibration.FakeStep.peak, checkpointing.set_checkpointing
    monkeypatch.setattr(calibration.FakeStep, "peak", lambda step, p: peaks.setdefault(p, peak(step, p)))
    monkeypatch.setattr(Execution, "callbacks", ["callbacks.checkpointing.RaiseCheckpointing"])

    def with_room_for(free):
        monkeypatch.setattr(Execution, "memory", lambda self: Double(free))
        monkeypatch.setattr(
            "lightning_modules.prepare.set_checkpointing", lambda *args: chosen.append(args[1]) or of_blocks(*args)
        )
        chosen.clear()
        text = run("train", *short(tiny, pairs, tmp_path / str(free), 6), "model.gradient_checkpointing=auto").text
        weights[free] = lora_bytes(tmp_path / str(free))
        assert chosen == list(POLICIES[::-1])[: len(chosen)]
        assert re.search(r"gradient_checkpointing=auto is (\w+): ", text)[1] == chosen[-1]
        return chosen[-1]

    assert with_room_for(0) == "full"
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    for policy, size in peaks.items():
        assert with_room_for(int(size / USABLE) + 2) == policy
    run("train", *short(tiny, pairs, tmp_path / "none", 6), "model.gradient_checkpointing=none")
    assert {*weights.values(), lora_bytes(tmp_path / "none")} == {weights[0]}


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
    assert raises == any(isinstance(one, RaiseCheckpointing) for one in module.configure_callbacks())
