"""task=average by the command line: post-hoc averages of a run's savings."""

import json
import math
import re

import pytest
import safetensors
import torch

from extras.average import ema_exponent, ema_weights
from foundation.errors import UserError
from tests.support.commands import run_task

FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture
def whole(runs):
    """Return the folder of a T-LoRA's run with an EMA that saves five times."""
    settings = ["adapter=tlora", "optimizer.lr=1e-2", "scheduler=constant", "save_every=1", "ema.half_life=4"]
    return runs(5, *settings).folder


def tensors(path):
    with safetensors.safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["retouch"])  # noqa: SIM118


def raw(run, step):
    return tensors(run / "lora" / f"step-{step:06d}-raw" / FILE)[0]


@pytest.mark.parametrize("std", [0.05, 0.28])
def test_exponent_has_the_standard_deviation(std):
    """The reference is computed from the moments of t^gamma on [0, 1]."""
    gamma = ema_exponent(std)
    mean = (gamma + 1) / (gamma + 2)
    assert math.sqrt((gamma + 1) / (gamma + 3) - mean**2) == pytest.approx(std, rel=1e-9)
    assert gamma > 0


@pytest.mark.parametrize("std", [0.05, 0.20])
def test_averaged_weights_equal_an_average_kept_at_each_checkpoint(std):
    """The reference is the update of equation 127 of the paper; later files weigh more, and the weights sum to one."""
    steps = [100, 200, 300, 400, 470]
    weights = ema_weights(steps, std)
    kept = [0.0] * len(steps)
    for number, (before, now) in enumerate(zip([0, *steps], steps, strict=False)):
        beta = (1 - (now - before) / now) ** (ema_exponent(std) + 1)
        kept = [beta * one for one in kept]
        kept[number] = 1 - beta
    assert weights == pytest.approx(kept, abs=1e-12)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert weights[:4] == sorted(weights[:4])


@pytest.mark.slow
def test_run_is_averaged_from_its_raw_weights_for_each_length(whole, tmp_path):
    text = run_task("average", f"lora={whole}", "average.relative_std=[0.05,0.2]", f"output_dir={tmp_path}")
    assert "raw weights of 5 files, step 1 to 5" in text
    steps = [1, 2, 3, 4, 5]
    _, trained = tensors(whole / "lora" / "last-raw" / FILE)
    for std in (0.05, 0.2):
        found, header = tensors(tmp_path / f"std-{std:g}" / FILE)
        for name, tensor in found.items():
            mean = sum(
                raw(whole, step)[name].double() * w for step, w in zip(steps, ema_weights(steps, std), strict=True)
            )
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, mean.float())
        assert header.pop("average") == {"relative_std": std, "steps": steps, "weights": ema_weights(steps, std)}
        assert header == trained
        assert header["adapter"]["rank_schedule"]["min_rank"] < 4
        assert any(not torch.equal(tensor, raw(whole, 5)[name]) for name, tensor in found.items())


def test_an_existing_average_is_replaced_only_if_configured(whole, tmp_path):
    folder = tmp_path / "mean"
    again = ["average", f"lora={whole}", f"output_dir={folder}"]
    run_task(*again)
    with pytest.raises(UserError, match=f"{folder / FILE} exists"):
        run_task(*again)
    run_task(*again, "overwrite=true")


def copy(source, target, change=lambda header: None, edit=lambda tensors: tensors):
    """Copy a file with another header and other tensors."""
    found, header = tensors(source)
    change(header)
    target.parent.mkdir(parents=True)
    metadata = {"retouch": json.dumps(header)} if header else {}
    target.write_bytes(safetensors.torch.save(edit(found), metadata))
    return target.parent


def test_equal_files_give_themselves(whole, tmp_path):
    source = whole / "lora" / "last-raw" / FILE
    files = [copy(source, tmp_path / str(n) / FILE, lambda header, n=n: header.update(step=n * n)) for n in (5, 2, 3)]
    run_task("average", f"lora=[{','.join(map(str, files))}]", f"output_dir={tmp_path / 'mean'}")
    found, header = tensors(tmp_path / "mean" / FILE)
    assert header["step"] == 25
    assert header["average"]["steps"] == [4, 9, 25]
    assert all(torch.equal(tensor, tensors(source)[0][name]) for name, tensor in found.items())


def test_files_of_different_runs_are_refused(gallery, whole, tmp_path):
    step = whole / "lora" / "step-000003-raw"

    def other(name, change, edit=lambda found: found):
        return copy(step / FILE, tmp_path / name / FILE, change, edit)

    averaged = other("average", lambda header: header.update(step=5, average={"relative_std": 0.1}))
    rank = other("rank", lambda header: header.update(step=5, adapter=header["adapter"] | {"rank": 8}))
    layers = other("layers", lambda header: header.update(step=5), lambda found: dict(list(found.items())[2:]))
    for given, words in {
        str(step): "give a run with several LoRA files",
        f"[{step},{step}]": "are both of step 3",
        f"[{step},{whole / 'lora' / 'step-000004'}]": "an EMA of the weights is False and True",
        f"[{step},{gallery('lora').folder}]": "are not of one run: ",
        f"[{step},{averaged}]": "was not saved by a training run",
        f"[{step},{rank}]": "rank is 4 and 8",
        f"[{step},{layers}]": "are not of one run: transformer.",
    }.items():
        with pytest.raises(UserError, match=re.escape(words)):
            run_task("average", f"lora={given}", f"output_dir={tmp_path / 'out'}")
        assert not list((tmp_path / "out").iterdir())
