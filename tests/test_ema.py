"""Runs that average what they train: files, checkpoints, resuming."""

import json
import re

import pytest
import safetensors
import torch

from tests.support.commands import lora_bytes, rows, short
from tests.support.several_runs import DDP, FSDP

FILE = "pytorch_lora_weights.safetensors"
SETTINGS = ["optimizer.lr=1e-2", "scheduler=constant", "data.batch_size=2"]


def lora(folder, name):
    return safetensors.torch.load(lora_bytes(folder, name))


def header(folder, name):
    with safetensors.safe_open(folder / "lora" / name / FILE, "pt") as file:
        return json.loads(file.metadata()["retouch"])


def saved(folder):
    return sorted(path.name for path in (folder / "lora").iterdir())


FOUR_A_STEP = ["optimizer.lr=1e-3", "scheduler=constant", "data.caption_dropout_rate=0", "ema.half_life=1"]
WINDOW = ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]


@pytest.mark.slow
def test_samples_of_an_accumulation_window_count_and_resuming_is_bitwise(run, tiny, pairs, tmp_path):
    """A checkpoint is saved in the middle of the window that the run is stopped in; the adapter has dropout."""

    def overrides(name, steps, *more):
        adapter = ["adapter=ortho_tlora", "adapter.dropout=0.2"]
        return [*short(tiny, pairs, tmp_path / name, steps), *FOUR_A_STEP, *WINDOW, *adapter, *more]

    run("train", *overrides("whole", 3))
    run("train", *overrides("parts", 2, "save_every=2"))
    run("train", *overrides("parts", 3, "save_every=2", "ckpt_path=last"))
    one, other = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["ema"] for name in ("whole", "parts")
    )
    assert one["samples"] == other["samples"] == 12
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(average, other["weights"][name]) for name, average in one["weights"].items())
    for name in ("last", "last-raw"):
        assert lora_bytes(tmp_path / "parts", name) == lora_bytes(tmp_path / "whole", name)


@pytest.mark.slow
def test_two_processes_average_as_one_and_split_weights_as_whole_ones(run, in_two_processes, tiny, pairs, tmp_path):
    """This includes schedule-free averages, and layers outside of the blocks, which FSDP leaves gathered."""
    layers = ["adapter.target_modules=all-linear", "model.sampling.num_inference_steps=1", "sample_every=2"]

    def overrides(name, steps, *more):
        common = short(tiny, pairs, tmp_path / name, steps, shown=True)
        return [*common, *FOUR_A_STEP, *layers, "data.val_count=2", "data.batch_size=2", *more]

    schedule_free = ["ema.half_life=null", "optimizer=adamw_schedule_free"]
    run("train", *overrides("one", 4, "data.batch_size=4"))
    status, text = in_two_processes(
        [
            overrides("two", 4, *DDP),
            overrides("split", 4, *FSDP),
            overrides("parts", 3, *FSDP),
            overrides("parts", 4, *FSDP, "ckpt_path=last"),
            overrides("free", 4, *FSDP, *schedule_free),
            overrides("free without pictures", 4, *FSDP, *schedule_free, "callbacks.sample_images=null"),
        ]
    )
    assert status == 0, text
    for name in ("last", "last-raw"):
        for kind in ("two", "split"):
            whole, shared = lora(tmp_path / "one", name), lora(tmp_path / kind, name)
            torch.testing.assert_close(shared, whole, rtol=0, atol=1e-5)
        assert lora_bytes(tmp_path / "parts", name) == lora_bytes(tmp_path / "split", name)
    assert lora_bytes(tmp_path / "free") == lora_bytes(tmp_path / "free without pictures")
    losses = [[row["val_loss"] for row in rows(tmp_path / name)] for name in ("one", "two", "split")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)


@pytest.mark.slow
def test_images_and_validation_use_the_chosen_weights(run, tiny, pairs, tmp_path):
    """Sampling does not change trained weights, reparametrized ones included; the chosen weights have cards."""

    def overrides(name, *more):
        common = short(tiny, pairs, tmp_path / name, 3, shown=True)
        quick = ["model.sampling.num_inference_steps=1", "callbacks.sample_images.count=1", "sample_every=1"]
        return [*common, *SETTINGS, *quick, "adapter=ortho_tlora", "data.val_count=1", "save_every=2", *more]

    run("train", *overrides("plain"))
    run("train", *overrides("ema", "ema.half_life=9"))
    run("train", *overrides("raw", "ema.half_life=9", "ema.sample_with=raw"))
    plain, ema, raw = (tmp_path / name for name in ("plain", "ema", "raw"))
    assert lora_bytes(plain) == lora_bytes(ema, "last-raw") == lora_bytes(raw)
    assert lora_bytes(raw, "last-ema") == lora_bytes(ema) != lora_bytes(plain)
    assert rows(raw) == rows(plain) != rows(ema)
    pictures = [(run_folder / "samples/step-000003").glob("*.png") for run_folder in (plain, raw, ema)]
    assert len({path.read_bytes() for paths in pictures for path in paths}) == 2
    best = f"step-{max(rows(ema)[1:], key=lambda row: row['psnr'])['step']:06.0f}"
    assert header(ema, "best")["ema"] == {"half_life": 9}
    assert "ema" not in header(ema, "last-raw")
    assert best not in saved(ema) or lora_bytes(ema, "best") == lora_bytes(ema, best)
    assert saved(raw) == ["best", "last", "last-ema", *(f"step-00000{n}{end}" for n in (2, 3) for end in ("", "-ema"))]
    cards = {path.parent.name: path.read_text() for path in ema.glob("lora/*/README.md")}
    assert cards.keys() == {"best", "last"}
    assert "averaged with a half-life of 9 samples" in cards["last"]
    assert "half-life" not in (raw / "lora/last/README.md").read_text()


@pytest.mark.slow
def test_step_that_is_not_finite_leaves_the_average_unchanged(run, tiny, pairs, tmp_path):
    settings = ["optimizer.lr=1e20", "scheduler=constant", "model.optimization.max_nonfinite_steps=3"]
    run("train", *short(tiny, pairs, tmp_path / "run", 9), *settings, "save_every=1", "ema.half_life=100", ok=False)
    averages = [lora(tmp_path / "run", f"step-00000{step}") for step in (1, 2, 3)]
    assert all(torch.equal(one[name], averages[0][name]) for one in averages for name in averages[0])
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["ema"]["samples"] == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ema.half_life=100", "optimizer=adamw_schedule_free"], "ema.half_life=100: AdamWScheduleFree averages its"),
        (["ema.half_life=0"], "ema.half_life=0: must be a number above 0 or null"),
        (["ema=100"], "ema=100: this is a group of settings"),
    ],
)
def test_wrong_settings_are_refused_before_loading(refuses, overrides, words):
    refuses(*overrides, words=words)


@pytest.mark.slow
def test_dry_run_counts_the_averages(run, tiny, pairs, tmp_path):
    text = run("train", *short(tiny, pairs, tmp_path / "run", 2), "ema.half_life=100", "task=dry_run").text
    [count] = re.findall(r"([\d,]+) parameters \(", text)
    [size, unit] = re.search(r"EMA ([\d.]+) ([kM])B", text).groups()
    assert float(size) * {"k": 1e3, "M": 1e6}[unit] == pytest.approx(4 * int(count.replace(",", "")), rel=0.05)
