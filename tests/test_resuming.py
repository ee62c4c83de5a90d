"""Runs that were stopped, killed or ended, and go on."""

import os
import shlex
import shutil
import signal
import time

import pytest
import torch

from tests.support.combinations import first
from tests.support.commands import kill_when, lora_bytes, metrics, short, wait_until
from tests.support.pictures import make_pairs


def test_resumed_run_is_bitwise_the_uninterrupted_one_after_kill_9(run, start, tiny, tmp_path):
    """In the middle of an epoch, in mixed sizes, with accumulation, caption dropout and two data workers."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32), (32, 32), (48, 32), (32, 48)])
    settings = ["trainer.accumulate_grad_batches=2", "data.batch_size=2", "data.num_workers=2", "save_every=4"]
    settings += ["data.caption_dropout_rate=0.3", "scheduler.num_warmup_steps=2"]
    run("train", *short(tiny, root, tmp_path / "whole", 8), *settings)

    killed = [*short(tiny, root, tmp_path / "killed", 8), *settings]
    process = start("train", *killed, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 6}")
    kill_when((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists, process)
    # Whatever the killed run reached after step 4 was never finished.
    assert not (tmp_path / "killed" / "lora" / "step-000008").exists()
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "killed", "step-000004")
    run("train", *killed, "ckpt_path=last")

    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "whole")
    assert lora_bytes(tmp_path / "whole", "step-000004") == lora_bytes(tmp_path / "killed", "step-000004")
    assert lora_bytes(tmp_path / "whole", "step-000004") != lora_bytes(tmp_path / "whole")
    steps, losses = ([row[key] for row in metrics(tmp_path / "killed")] for key in ("step", "loss"))
    assert steps == [str(n) for n in range(1, 9)]
    assert losses == [row["loss"] for row in metrics(tmp_path / "whole")]


@pytest.mark.parametrize(
    "optimizer", first(1, ["adamw_schedule_free", "adamw_8bit", "paged_adamw_8bit", "prodigy", "adafactor"])
)
def test_resume_is_bitwise_for_other_optimizers(run, tiny, pairs, tmp_path, optimizer):
    settings = [f"optimizer={optimizer}", "scheduler=constant"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 6), *settings, "save_every=0")
    run("train", *short(tiny, pairs, tmp_path / "halves", 3), *settings, "save_every=2")
    run("train", *short(tiny, pairs, tmp_path / "halves", 6), *settings, "ckpt_path=last", "save_every=2")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")


@pytest.mark.parametrize("number", first(1, [signal.SIGTERM, signal.SIGINT]))
def test_signal_saves_and_the_run_goes_on_exactly(run, start, tiny, pairs, tmp_path, number):
    """To the whole process group, data workers included, as a terminal and a cluster send it; within a window."""
    settings = ["trainer.accumulate_grad_batches=3", "save_every=0", "scheduler=constant", "data.num_workers=2"]
    folder = tmp_path / "a stopped run"
    stopped = [*short(tiny, pairs, folder, 10_000), *settings]
    process = start("train", *stopped)
    wait_until((folder / "metrics.csv").exists, process)
    wait_until(lambda: len((folder / "metrics.csv").read_text().splitlines()) > 3, process)
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert "Traceback" not in text
    assert f"stopped by {number.name} after step" in text
    [line] = [line for line in text.splitlines() if "resume with the same command and" in line]
    goes_on = shlex.split(line.partition("same command and ")[2])
    assert goes_on == [f"output_dir={folder}", "ckpt_path=last"]
    step = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"]
    assert (folder / "lora" / f"step-{step:06d}").is_dir()

    run("train", *stopped, *goes_on, f"trainer.max_steps={step + 3}")
    run("train", *short(tiny, pairs, tmp_path / "whole", step + 3), *settings)
    assert lora_bytes(folder) == lora_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_run_that_was_killed_behind_its_last_saving_gets_its_end(run, tiny, pairs, tmp_path):
    """Its last pictures, what they measure, and its report; so does one that was killed so in the middle."""
    folder = tmp_path / "run"

    def arguments(steps):
        common = short(tiny, pairs, folder, steps, shown=True)
        settings = ["callbacks.sample_images.num_inference_steps=1", "callbacks.sample_images.count=2"]
        return [*common, *settings, "data.val_count=2", "save_every=2", "sample_every=2", "scheduler=constant"]

    run("train", *arguments(4))
    pictures = sorted((folder / "samples" / "step-000004").glob("*.png"))
    before = {path: path.read_bytes() for path in (folder / "validation.csv", folder / "grid.png", *pictures)}
    assert len(pictures) == 2
    weights_before = lora_bytes(folder)

    def kill_behind_last_saving():
        rows = (folder / "validation.csv").read_text().splitlines()
        (folder / "validation.csv").write_text("\n".join(rows[:-1]) + "\n")
        shutil.rmtree(folder / "samples" / "step-000004")
        (folder / "grid.png").unlink()
        (folder / "report.html").unlink()

    for measured_only in (False, True):
        kill_behind_last_saving()
        if measured_only:
            (folder / "samples" / "step-000004").mkdir()
            for path in pictures:
                path.write_bytes(before[path])
        outcome = run("train", *arguments(4), "ckpt_path=last")
        assert "nothing to do" in outcome.text
        assert {path: path.read_bytes() for path in before} == before
        assert "http-equiv" not in (folder / "report.html").read_text(), "a finished report waits for nothing"
        assert lora_bytes(folder) == weights_before
    kill_behind_last_saving()
    run("train", *arguments(6), "ckpt_path=last")
    steps = [line.split(",")[0] for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    assert steps == ["0", "2", "4", "6"]


def test_run_that_saved_nothing_is_started_anew(run, tiny, pairs, tmp_path, monkeypatch):
    """It was ended at once, by a second signal, before its first saving."""
    monkeypatch.setattr("callbacks.signals.DEBOUNCE", 0.0)
    folder = tmp_path / "run"
    arguments = [*short(tiny, pairs, folder, 400), "save_every=0", "trainer.log_every_n_steps=1"]
    outcome = run("train", *arguments, "+callbacks.stop={_target_: tests.support.probes.StopTwice, step: 2}", ok=False)
    assert outcome.status == 128 + signal.SIGINT
    assert "stopped by SIGINT; nothing to save" in outcome.text
    assert "Traceback" not in outcome.text
    assert (folder / "config.yaml").is_file()

    error = run("train", *arguments, "ckpt_path=last", ok=False).error
    assert "there is no checkpoint" in error
    assert "leave ckpt_path out to start it anew" in error
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert "it is started anew" in run("train", *arguments, "trainer.max_steps=2").text
    assert [row["step"] for row in metrics(folder)] == ["1", "2"]
    assert not (folder / "samples").exists()
    assert (folder / "notes.txt").exists()


def test_a_run_is_not_resumed_with_a_changed_setting(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "run", 2)
    run("train", *arguments)
    error = run("train", *arguments, "ckpt_path=last", "optimizer.lr=1e-2", ok=False).error
    assert "cannot resume with a changed setting: optimizer.lr was 0.0001 in" in error
    assert "adapter.init_from=" in error
    # Weights of one shape start none of another.
    for setting in ("adapter.rank=8", "adapter.rank_pattern={*:2}", "adapter.layers=[transformer_blocks.0]"):
        error = run("train", *arguments, "ckpt_path=last", setting, ok=False).error
        assert "Leave ckpt_path out and start anew" in error
        assert "init_from" not in error
    error = run("train", *arguments, "ckpt_path=last", "objective=slider", ok=False).error
    assert "cannot resume with a changed setting: objective._target_ was" in error
    config = tmp_path / "run" / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    earlier = [line for line in lines if "lora_plus_ratio" not in line and "use_rslora" not in line]
    assert len(earlier) == len(lines) - 2
    config.write_text("".join(earlier))  # of a version without these settings
    assert "nothing to do" in run("train", *arguments, "ckpt_path=last").text
    changed = ["data.batch_size=2", "objective.weighting=cosine"]
    text = run("train", *arguments, "ckpt_path=last", "trainer.max_steps=3", *changed).text
    assert "note: data.batch_size was 1 in" in text
    assert "note: objective.weighting was None in" in text


def test_what_was_learned_is_kept_when_a_run_fails(run, tiny, pairs, tmp_path):
    """Between two savings, and although the failing picture was fine when the run started."""
    arguments = [*short(tiny, pairs, tmp_path / "run", 9), "save_every=0"]
    settings = ["optimizer.lr=1e20", "scheduler=constant", "model.max_nonfinite_steps=2", "trainer.log_every_n_steps=3"]
    run("train", *arguments, *settings, ok=False)
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3
    assert (tmp_path / "run" / "lora" / "step-000003").is_dir()


@pytest.mark.slow
def test_newest_run_goes_on_without_naming_it(run, tiny, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in short(tiny, pairs, tmp_path, 2) if "output_dir" not in a]
    run("train", *arguments)
    (folder,) = (tmp_path / "outputs").iterdir()
    monkeypatch.setattr(time, "strftime", lambda *_: folder.name)  # of the same second
    run("train", *arguments, "ckpt_path=last", "trainer.max_steps=3")
    assert list((tmp_path / "outputs").iterdir()) == [folder]
    assert [row["step"] for row in metrics(folder)] == ["1", "2", "3"]
    run("train", "-m", *arguments, "trainer.max_steps=1,2")
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {folder.name, f"{folder.name}-2"}
    assert {path.name for path in (tmp_path / "outputs" / f"{folder.name}-2").iterdir()} >= {"0", "1", "sweep.csv"}
