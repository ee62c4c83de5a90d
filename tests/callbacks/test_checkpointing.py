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

        device = SimpleNamespace(restart=lambda: None, taken=lambda: peaks[chosen[-1]], free=lambda: free)
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


@pytest.mark.parametrize(("compiles", "expected"), [(True, ["attention"]), (False, [])])
def test_resumed_run_compiles_as_the_run_before(compiles, expected):
    """A first step with another policy would be eager, and round differently."""
    before, after, chosen = RaiseCheckpointing(), RaiseCheckpointing(), []
    before._policy = "attention"
    after.load_state_dict(before.state_dict())
    module = mock.Mock(EditModule, objective=mock.Mock(), device=torch.device("cpu"), base=mock.MagicMock())
    module.execution = SimpleNamespace(
        searches_checkpointing=True, compiles=compiles, set_checkpointing=lambda _, policy: chosen.append(policy)
    )
    module.transformer = None
    after.on_train_start(mock.MagicMock(global_step=3), module)
    assert chosen == expected
    assert (after._memory is None) == compiles, "else it searches"


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
