"""Runs that average what they train: files, checkpoints, resuming."""

import json
import re

import pytest
import safetensors
import torch

from lightning_modules.ema import RAMP_UP
from tests.support.combinations import first
from tests.support.commands import lora_bytes, rows, short
from tests.support.several_runs import DDP, FSDP

FILE = "pytorch_lora_weights.safetensors"
HALF_LIFE = 1.0
SETTINGS = ["optimizer.lr=1e-2", "scheduler=constant", "data.batch_size=2"]
AVERAGED = [*SETTINGS, f"ema.half_life={HALF_LIFE}"]


def lora(folder, name):
    return safetensors.torch.load(lora_bytes(folder, name))


def header(folder, name):
    with safetensors.safe_open(folder / "lora" / name / FILE, "pt") as file:
        return json.loads(file.metadata()["retouch"])


def saved(folder):
    return sorted(path.name for path in (folder / "lora").iterdir())


@pytest.mark.parametrize("more", first(1, [["adapter=tlora"], ["adapter=lora", "optimizer=adafactor"]]))
def test_files_hold_the_average_and_beside_it_the_weights_that_train(run, tiny, pairs, tmp_path, more):
    """The average is worked out again from the weights of each step; they are what they are without it."""
    run("train", *short(tiny, pairs, tmp_path / "run", 8), *AVERAGED, "save_every=1", *more)
    run("train", *short(tiny, pairs, tmp_path / "plain", 8), *SETTINGS, "save_every=8", *more)
    run("train", *short(tiny, pairs, tmp_path / "start", 1), *more, "optimizer.lr=0", "optimizer.weight_decay=0")
    assert lora_bytes(tmp_path / "run", "last-raw") == lora_bytes(tmp_path / "plain")
    assert saved(tmp_path / "plain") == ["last", "step-000008"]
    steps = [f"step-{step:06d}" for step in range(1, 9)]
    assert saved(tmp_path / "run") == sorted([*steps, *(f"{step}-raw" for step in steps), "last", "last-raw"])
    average = {name: tensor.double() for name, tensor in lora(tmp_path / "start", "last").items()}
    for number, step in enumerate(steps, 1):
        decay = 0.5 ** (2 / min(HALF_LIFE, RAMP_UP * 2 * number))
        raw = lora(tmp_path / "run", f"{step}-raw")
        average = {name: decay * tensor + (1 - decay) * raw[name] for name, tensor in average.items()}
        for name, tensor in lora(tmp_path / "run", step).items():
            torch.testing.assert_close(tensor, average[name].float(), rtol=1e-5, atol=1e-8)
        assert header(tmp_path / "run", step)["ema"] == {"half_life": HALF_LIFE}
        assert "ema" not in header(tmp_path / "run", f"{step}-raw")
    assert RAMP_UP * 2 * 5 < HALF_LIFE < RAMP_UP * 2 * 8
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "run", "step-000008")
    assert lora_bytes(tmp_path / "run") != lora_bytes(tmp_path / "run", "last-raw")


def same(one, other, name):
    """As far as weights agree that were trained in another order of sums."""
    ours, theirs = lora(one, name), lora(other, name)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-5)


# The half-life is reached in the third step: until then it does not matter how many samples a step has.
FOUR_A_STEP = ["optimizer.lr=1e-3", "scheduler=constant", "data.caption_dropout_rate=0", "ema.half_life=1"]
WINDOW = ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]


def test_samples_count_in_a_window_as_in_a_batch_and_resuming_is_bitwise(run, tiny, pairs, tmp_path):
    """Also with checkpoints in the middle of the window that a run is stopped in."""

    def overrides(name, steps, *more):
        return [*short(tiny, pairs, tmp_path / name, steps), *FOUR_A_STEP, *more]

    run("train", *overrides("batch", 4, "data.batch_size=4"))
    run("train", *overrides("window", 4, *WINDOW))
    run("train", *overrides("parts", 3, *WINDOW, "save_every=2"))
    run("train", *overrides("parts", 4, *WINDOW, "save_every=2", "ckpt_path=last"))
    states = [torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("window", "parts")]
    assert [int(state["ema"]["samples"]) for state in states] == [16, 16]
    assert states[0]["ema"]["weights"].keys() == states[1]["ema"]["weights"].keys()
    for name, average in states[0]["ema"]["weights"].items():
        assert torch.equal(average, states[1]["ema"]["weights"][name])
    for name in ("last", "last-raw"):
        same(tmp_path / "batch", tmp_path / "window", name)
        assert lora_bytes(tmp_path / "parts", name) == lora_bytes(tmp_path / "window", name)


@pytest.mark.slow
def test_two_processes_average_as_one_and_split_weights_as_whole_ones(run, in_two_processes, tiny, pairs, tmp_path):
    """Of layers outside of the blocks, too, which FSDP leaves together behind a picture; so a schedule-free average."""
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
            overrides("plain", 4, *FSDP, "ema.half_life=null"),
            overrides("parts", 3, *FSDP),
            overrides("parts", 4, *FSDP, "ckpt_path=last"),
            overrides("free", 4, *FSDP, *schedule_free),
            overrides("free without pictures", 4, *FSDP, *schedule_free, "callbacks.sample_images=null"),
        ]
    )
    assert status == 0, text
    for name in ("last", "last-raw"):
        same(tmp_path / "one", tmp_path / "two", name)
        same(tmp_path / "one", tmp_path / "split", name)
        assert lora_bytes(tmp_path / "parts", name) == lora_bytes(tmp_path / "split", name)
    assert lora_bytes(tmp_path / "plain") == lora_bytes(tmp_path / "split", "last-raw")
    assert lora_bytes(tmp_path / "free") == lora_bytes(tmp_path / "free without pictures")
    losses = [[row["val_loss"] for row in rows(tmp_path / name)] for name in ("one", "two", "split")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)


def test_pictures_and_validation_are_those_of_the_weights_that_are_chosen(run, tiny, pairs, tmp_path):
    """They change nothing of what trains, reparametrized weights included; cards stand beside the chosen."""

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
    assert "ema" in header(ema, "best")
    assert best not in saved(ema) or lora_bytes(ema, "best") == lora_bytes(ema, best)
    assert saved(raw) == ["best", "last", "last-ema", *(f"step-00000{n}{end}" for n in (2, 3) for end in ("", "-ema"))]
    cards = {path.parent.name: path.read_text() for path in ema.glob("lora/*/README.md")}
    assert cards.keys() == {"best", "last"}
    assert "averaged with a half-life of 9 samples" in cards["last"]
    assert "half-life" not in (raw / "lora/last/README.md").read_text()


@pytest.mark.slow
def test_whole_models_are_averaged_and_go_on_bitwise(run, tiny, pairs, tmp_path):
    def overrides(name, steps, *more):
        common = [one for one in short(tiny, pairs, tmp_path / name, steps) if not one.startswith("adapter.")]
        full = ["adapter=full", "adapter.text_encoders=true", "model.max_sequence_length=16"]
        return [*common, *full, *AVERAGED, "optimizer=muon", *more]

    def files(name):
        folder = tmp_path / name / "model"
        return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*.safetensors")}

    run("train", *overrides("whole", 4))
    run("train", *overrides("parts", 2))
    half = files("parts")
    run("train", *overrides("parts", 4, "ckpt_path=last"))
    run("train", *overrides("plain", 4, "ema.half_life=null"))
    whole, plain = files("whole"), files("plain")
    assert files("parts") == whole != half
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        [file] = [path for path in plain if path.startswith(f"last/{name}/")]
        assert whole[file.replace("last/", "last-raw/")] == plain[file] != whole[file]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_step_that_is_not_finite_leaves_the_average_alone(run, tiny, pairs, tmp_path, optimizer):
    settings = [
        f"optimizer={optimizer}",
        "optimizer.lr=1e20",
        "scheduler=constant",
        "model.optimization.max_nonfinite_steps=3",
    ]
    run("train", *short(tiny, pairs, tmp_path / "run", 9), *settings, "save_every=1", "ema.half_life=100", ok=False)
    averages = [lora(tmp_path / "run", f"step-00000{step}") for step in (1, 2, 3)]
    assert all(torch.equal(one[name], averages[0][name]) for one in averages for name in averages[0])
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["ema"]["samples"] == 1


@pytest.mark.slow
def test_average_cannot_begin_end_or_change_in_a_run(run, tiny, pairs, tmp_path):
    with_average, without = (short(tiny, pairs, tmp_path / name, 1) for name in ("with", "without"))
    run("train", *with_average, "ema.half_life=5")
    run("train", *without)
    again = ["trainer.max_steps=2", "ckpt_path=last"]
    assert "ema.half_life was 5" in run("train", *with_average, "ema.half_life=6", *again, ok=False).error
    for name in ("with", "without"):
        (tmp_path / name / "config.yaml").unlink()
    assert "without an average" in run("train", *without, "ema.half_life=5", *again, ok=False).error
    assert "with ema.half_life" in run("train", *with_average, *again, ok=False).error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["ema.half_life=100", "optimizer=adamw_schedule_free"],
            "ema.half_life=100: AdamWScheduleFree averages its weights already",
        ),
        (["ema.half_life=0"], "ema.half_life=0: must be a number above 0 or null"),
        (["ema=100"], "write ema.half_life=100"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_loaded(refuses, overrides, words):
    refuses(*overrides, words=words)


@pytest.mark.slow
def test_dry_run_counts_the_averages_and_the_shortest_run_has_them(run, tiny, pairs, tmp_path):
    arguments = [*short(tiny, pairs, tmp_path / "run", 2, shown=True), "ema.half_life=100"]
    text = run("train", *arguments, "task=dry_run").text
    [count] = re.findall(r"([\d,]+) parameters \(", text)
    [size, unit] = re.search(r"EMA ([\d.]+) ([kM])B", text).groups()
    assert float(size) * {"k": 1e3, "M": 1e6}[unit] == pytest.approx(4 * int(count.replace(",", "")), rel=0.05)
    assert "EMA" not in run("train", *arguments[:-1], "task=dry_run").text
    run("train", *[one for one in arguments if "max_steps" not in one], "debug=fast_dev_run", "data.val_count=1")
    assert saved(tmp_path / "run") == sorted(
        ["best", "last", "last-raw", *(f"step-00000{n}{end}" for n in (1, 2) for end in ("", "-raw"))]
    )
