"""model.gradient_checkpointing=auto, on memory that a double counts."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from callbacks import checkpointing as checkpointing_callback
from callbacks.checkpointing import RaiseCheckpointing
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation import memory
from lightning_modules.estimation.memory import USABLE, choose_policy
from lightning_modules.execution import checkpointing
from lightning_modules.execution.execution import Execution
from tests.support.commands import lora_bytes, short, unloaded


def test_the_least_recomputation_that_fits_is_chosen():
    needs = {"none": 480, "every_2": 260, "attention": 76, "full": 46}
    for policy, size in needs.items():
        assert choose_policy(needs, 0.5, size / USABLE) == choose_policy(needs, 1.5, 1.5 * size / USABLE) == policy
    assert choose_policy(needs, 1, 0) == "full"


@pytest.mark.slow
def test_runs_are_bitwise_equal_under_any_policy(run, runs, tiny, pairs, tmp_path, monkeypatch):
    """Cases: no memory left, just enough for a policy, another process with less."""
    peaks, chosen = {}, []
    peak, of_blocks, reduce = memory.FakeStep.peak, checkpointing.set_checkpointing, SingleDeviceStrategy.reduce
    plain = lora_bytes(runs(2, "model.gradient_checkpointing=none").folder)
    monkeypatch.setattr(memory.FakeStep, "peak", lambda step, p: peaks.setdefault(p, peak(step, p)))
    monkeypatch.setattr(Execution, "searches_checkpointing", True)
    monkeypatch.setattr(
        "lightning_modules.execution.execution.set_checkpointing",
        lambda *args: chosen.append(args[1]) or of_blocks(*args),
    )

    def with_room_for(free, elsewhere=1e12):
        def least(self, x, *args, reduce_op="mean", **more):
            if reduce_op == "max" and x.ndim:
                return torch.maximum(x, torch.tensor([0, -elsewhere], dtype=x.dtype))
            return reduce(self, x, *args, reduce_op=reduce_op, **more)

        device = SimpleNamespace(device="cpu", restart=lambda: None, taken=lambda: peaks[chosen[-1]], free=lambda: free)
        monkeypatch.setattr(checkpointing_callback, "DeviceMemory", lambda _: device)
        monkeypatch.setattr(SingleDeviceStrategy, "reduce", least)
        chosen.clear()
        folder = tmp_path / f"{free} {elsewhere}"
        text = run("train", *short(tiny, pairs, folder, 2), "model.gradient_checkpointing=auto").text
        assert lora_bytes(folder) == plain
        assert chosen[0] == "full"
        assert re.search(r"gradient_checkpointing=auto is (\w+): ", text)[1] == chosen[-1]
        return chosen[-1]

    assert with_room_for(0) == "full"
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    rooms = {policy: int(size / USABLE) + 2 for policy, size in peaks.items()}
    assert with_room_for(rooms["none"]) == "none"
    assert with_room_for(rooms["none"], elsewhere=rooms["every_2"]) == "every_2"


def test_run_whose_estimate_fails_uses_full_checkpointing(run, tiny, pairs, tmp_path, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no fake of this operator")

    monkeypatch.setattr(Execution, "searches_checkpointing", True)
    monkeypatch.setattr(memory.FakeStep, "peak", fail)
    text = run("train", *short(tiny, pairs, tmp_path / "run", 1), "model.gradient_checkpointing=auto").text
    assert "no estimate for gradient_checkpointing=auto, which stays full: no fake of this operator" in text


GB = 10**9
# About FLUX.1 Kontext at 1024 pixels, batch 1: a step by policy; weights and optimizer.
NEEDS = {"none": 45 * GB, "every_2": 25 * GB, "attention": 8 * GB, "full": 5 * GB}
WEIGHTS = {"bf16": 24 * GB, "fp8": 12.5 * GB}


class Card:
    """A run of two steps on GPUs of these sizes, the first of which is this process's."""

    def __init__(self, *cards, weights="fp8", compiles=True, scale=1.0, excess=1.0, estimates=True):
        self.free = [card * GB - WEIGHTS[weights] for card in cards]
        self.needs = {policy: scale * size for policy, size in NEEDS.items()} if estimates else {}
        self.excess, self.compiles, self.set = excess, compiles, []

    def run(self, monkeypatch, before=None):
        """Return the state of its checkpoint; `set` are the policies, and after how many steps."""
        device, needs = torch.device("cpu"), self.needs
        memory = SimpleNamespace(device=device, restart=lambda: None, free=lambda: self.free[0])
        memory.taken = lambda: self.excess * needs.get("full", 0)
        monkeypatch.setattr(checkpointing_callback, "DeviceMemory", lambda _: memory)
        monkeypatch.setattr(checkpointing_callback, "PairsDataModule", mock.Mock())
        monkeypatch.setattr(checkpointing_callback, "policy_needs", lambda *_: (needs, 100))
        trainer, module = (
            mock.MagicMock(global_step=3),
            mock.MagicMock(EditModule, objective=mock.Mock(), device=device),
        )
        trainer.strategy.reduce = lambda x, reduce_op: x.maximum(torch.tensor([0, -min(self.free)], dtype=x.dtype))
        chosen = lambda _, policy: self.set.append((trainer.global_step - 3, policy))  # noqa: E731
        module.execution = SimpleNamespace(
            searches_checkpointing=True, compiles=self.compiles, set_checkpointing=chosen
        )
        module.base, module.transformer, callback = mock.MagicMock(), None, RaiseCheckpointing()
        if before is not None:
            callback.load_state_dict(before)
        callback.on_train_start(trainer, module)
        for trainer.global_step in (4, 5):
            callback.on_train_batch_start(trainer, module)
            callback.on_after_backward(trainer, module)
            callback.on_train_batch_end(trainer, module, {"tokens": 100}, None, 0)
        return callback.state_dict()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Card(80), Card(80), [(0, "none")]),
        (Card(80), Card(40), [(1, "attention")]),
        (Card(80), Card(24), [(1, "attention")]),
        (Card(80), Card(16), [(1, "full")]),
        (Card(40), Card(80), [(0, "attention")]),
        (Card(80, weights="bf16"), Card(40, weights="bf16"), [(1, "attention")]),
        (Card(48), Card(48, scale=2), [(1, "attention")]),  # a larger batch or resolution
        (Card(80), Card(80, scale=0.25), [(0, "none")]),
        (Card(80), Card(80, 40), [(1, "attention")]),  # another GPU, a smaller one
        (Card(72, excess=1.1), Card(66, excess=1.1), [(1, "every_2")]),  # the run before took more than was estimated
        (Card(80), Card(80, estimates=False), [(1, "full")]),
        (Card(16), Card(16, estimates=False), [(0, "full")]),
        (Card(80, compiles=False), Card(80, compiles=False), [(1, "none")]),  # the same bits under any policy
    ],
)
def test_resumed_run_begins_with_the_policy_of_the_run_before_if_it_fits(monkeypatch, before, after, expected):
    """A first step with another policy would be eager, and round differently."""
    after.run(monkeypatch, before.run(monkeypatch))
    assert after.set == expected


@pytest.mark.parametrize(("card", "expected"), [(80, "none"), (48, "every_2"), (40, "attention"), (16, "full")])
def test_first_run_takes_what_fits_an_fp8_base_on_the_card(monkeypatch, card, expected):
    (run := Card(card)).run(monkeypatch)
    assert run.set == [(1, expected)]


@pytest.mark.parametrize(
    ("device", "settings", "raises"),
    [
        ("cuda", [], True),
        ("cpu", [], False),
        ("cuda", ["model.gradient_checkpointing=attention"], False),
        ("cuda", ["model.offload.blocks=2"], False),
        ("cuda", ["model.offload.activations=true"], False),
    ],
)
def test_runs_on_a_gpu_raise_it_if_nothing_waits_on_the_host(tiny, device, settings, raises):
    module = unloaded(tiny, "flux_kontext", *settings)
    module.base._device = lambda: torch.device(device)
    module.execution.check(sharded=False)
    assert module.execution.searches_checkpointing is raises
