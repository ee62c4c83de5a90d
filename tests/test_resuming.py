"""Runs that were stopped, killed or ended, and go on."""

import math
import os
import resource
import shlex
import shutil
import signal
import time

import pytest
import torch
import yaml
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.optim import lr_scheduler

from datamodules.errors import UserError
from lightning_modules.optimization import Optimization
from runs.run_folder import RunFolder, shorten
from tasks import resuming
from tasks.arguments import with_run_settings
from tasks.resuming import check_resumable, find_checkpoint
from tests.support.combinations import first
from tests.support.commands import kill_when, lora_bytes, metrics, short, wait_until
from tests.support.gallery import SHOWN
from tests.support.hold import kill_before_the_first_checkpoint
from tests.support.pictures import make_pairs, photograph


def test_resumed_run_is_bitwise_the_uninterrupted_one_after_kill_9(run, start, tiny, tmp_path):
    """The run is killed within an epoch, with mixed sizes, accumulation, caption dropout and two data workers."""
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
def test_resume_is_bitwise_for_other_optimizers(run, runs, copied, tiny, pairs, optimizer):
    settings = [f"optimizer={optimizer}", "scheduler=constant"]
    folder = copied(runs(3, *settings))
    run("train", *short(tiny, pairs, folder, 6), *settings, "ckpt_path=last", "save_every=2")
    assert lora_bytes(folder) == lora_bytes(runs(6, *settings).folder)


def test_signal_saves_and_the_run_goes_on_exactly(run, start, tiny, pairs, tmp_path):
    """The whole process group gets the signal, as from a terminal or a cluster, within an accumulation window."""
    settings = ["trainer.accumulate_grad_batches=3", "save_every=0", "scheduler=constant", "data.num_workers=2"]
    folder = tmp_path / "a stopped run"
    stopped = [*short(tiny, pairs, folder, 10_000), *settings]
    process = start("train", *stopped)
    wait_until((folder / "metrics.csv").exists, process)
    wait_until(lambda: len((folder / "metrics.csv").read_text().splitlines()) > 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    assert "stopped by SIGTERM after step" in text
    [line] = [line for line in text.splitlines() if "resume with the same command and" in line]
    goes_on = shlex.split(line.partition("same command and ")[2])
    assert goes_on == [f"output_dir={folder}", "ckpt_path=last"]
    step = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"]
    assert (folder / "lora" / f"step-{step:06d}").is_dir()

    run("train", *stopped, *goes_on, f"trainer.max_steps={step + 3}")
    run("train", *short(tiny, pairs, tmp_path / "whole", step + 3), *settings)
    assert lora_bytes(folder) == lora_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_run_killed_after_its_last_checkpoint_gets_its_end(run, gallery, copied, tiny, pairs):
    """The resumed run adds its last images, their metrics and its report, also if it then trains further."""
    folder = copied(gallery("shown"))

    def arguments(steps):
        return [*short(tiny, pairs, folder, steps, shown=True), *SHOWN]

    pictures = sorted((folder / "samples" / "step-000004").glob("*.png"))
    before = {path: path.read_bytes() for path in (folder / "validation.csv", folder / "grid.png", *pictures)}
    assert len(pictures) == 2
    weights_before = lora_bytes(folder)

    def kill_after_last_checkpoint():
        rows = (folder / "validation.csv").read_text().splitlines()
        (folder / "validation.csv").write_text("\n".join(rows[:-1]) + "\n")
        shutil.rmtree(folder / "samples" / "step-000004")
        (folder / "grid.png").unlink()
        (folder / "report.html").unlink()

    for measured_only in (False, True):
        kill_after_last_checkpoint()
        if measured_only:
            (folder / "samples" / "step-000004").mkdir()
            for path in pictures:
                path.write_bytes(before[path])
        outcome = run("train", *arguments(4), "ckpt_path=last")
        assert "nothing to do" in outcome.text
        assert {path: path.read_bytes() for path in before} == before
        assert "http-equiv" not in (folder / "report.html").read_text(), "a finished report waits for nothing"
        assert lora_bytes(folder) == weights_before
    kill_after_last_checkpoint()
    run("train", *arguments(6), "ckpt_path=last")
    steps = [line.split(",")[0] for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    assert steps == ["0", "2", "4", "6"]


def test_run_that_saved_nothing_is_started_anew(run, tiny, pairs, tmp_path, monkeypatch):
    """A second signal ended it before its first checkpoint."""
    monkeypatch.setattr("runs.signals.DEBOUNCE", 0.0)
    folder = tmp_path / "run"
    arguments = [*short(tiny, pairs, folder, 400), "save_every=0", "trainer.log_every_n_steps=1"]
    outcome = run("train", *arguments, "+callbacks.stop={_target_: tests.support.probes.StopTwice, step: 2}", ok=False)
    assert outcome.status == 128 + signal.SIGINT
    assert "stopped by SIGINT; nothing to save" in outcome.text
    assert "Traceback" not in outcome.text
    assert (folder / "config.yaml").is_file()

    error = run("train", *arguments, "ckpt_path=last", ok=False).error
    assert "there is no checkpoint" in error
    assert "leave ckpt_path out to start it again" in error
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert "it is started again" in run("train", *arguments, "trainer.max_steps=2").text
    assert [row["step"] for row in metrics(folder)] == ["1", "2"]
    assert not (folder / "samples").exists()
    assert (folder / "notes.txt").exists()


def test_a_run_is_not_resumed_with_a_changed_setting(run, gallery, copied, tiny, pairs):
    folder = copied(gallery("plain"))
    arguments = short(tiny, pairs, folder, 2)
    error = run("train", *arguments, "ckpt_path=last", "optimizer.lr=1e-2", ok=False).error
    assert "cannot resume with a changed setting: optimizer.lr was 0.0001 in" in error
    assert "adapter.init_from=" in error
    # Weights of one shape start none of another.
    for setting in ("adapter.rank=8", "adapter.rank_pattern={*:2}", "adapter.target_modules=[to_q]"):
        error = run("train", *arguments, "ckpt_path=last", setting, ok=False).error
        assert "Leave ckpt_path out and start again" in error
        assert "init_from" not in error
    error = run("train", *arguments, "ckpt_path=last", "objective=slider", ok=False).error
    assert "cannot resume with a changed setting: objective._target_ was" in error
    config = folder / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    earlier = [line for line in lines if "lora_plus_ratio" not in line and "use_rslora" not in line]
    assert len(earlier) == len(lines) - 2
    config.write_text("".join(earlier))  # of a version without these settings
    assert "nothing to do" in run("train", *arguments, "ckpt_path=last").text
    changed = ["data.batch_size=2", "objective.weighting=cosine"]
    text = run("train", *arguments, "ckpt_path=last", "trainer.max_steps=3", *changed).text
    assert "note: data.batch_size was 1 in" in text
    assert "note: objective.weighting was None in" in text


def test_extended_run_takes_the_new_schedules_learning_rate_from_its_first_step(run, runs, copied, tiny, pairs):
    settings = ["scheduler=cosine", "optimizer.lr=0.003", "adapter.lora_plus_ratio=4"]
    past = runs(4, *settings)
    folder = copied(past)
    assert "was read back" in past.text
    table = folder / "metrics.csv"
    former = metrics(folder)[-1]["seconds"]
    table.write_text(table.read_text().replace(f",{former}\n", ",3600\n"))  # it took an hour
    text = run("train", *short(tiny, pairs, folder, 8), *settings, "ckpt_path=last").text
    assert "was read back" not in text
    assert all(3600 < float(row["seconds"]) < 3700 for row in metrics(folder)[4:])
    rates = [float(row["lr"]) for row in metrics(folder)][4:]
    assert rates == pytest.approx([0.5 * 0.003 * (1 + math.cos(math.pi * step / 8)) for step in range(4, 8)], rel=1e-5)
    assert "note: trainer.max_steps was 4 in" in text
    assert text.count("note:") == 1


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, steps: get_cosine_schedule_with_warmup(optimizer, steps // 4, steps),
        lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
        lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, [0.3, 1.2], total_steps=steps),
        lambda optimizer, steps: lr_scheduler.MultiStepLR(optimizer, [steps // 2]),
        lambda optimizer, steps: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, steps)],
            [steps // 3],
        ),
    ],
    ids=["warmup", "annealing", "one cycle", "multi step", "sequential"],
)
@pytest.mark.parametrize("steps", [8, 12, 20])
def test_a_resumed_schedule_has_the_rates_and_momenta_of_one_that_was_never_stopped(schedule, steps):
    """Extended, as it was, and shortened; bit for bit."""

    def start(steps):
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.4)]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, schedule(optimizer, steps)

    def follow(optimizer, scheduler, count):
        seen = []
        for _ in range(count):
            seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return seen

    whole = follow(*start(steps), 8)
    former, scheduler = start(12)
    follow(former, scheduler, 5)
    resumed, scheduler = start(steps)
    resumed.load_state_dict(former.state_dict())
    Optimization.follow_schedule(scheduler, 5)
    assert follow(resumed, scheduler, 3) == whole[5:]


def test_changed_accumulation_is_that_of_the_first_step_after_resuming(run, runs, copied, tiny, pairs, tmp_path):
    settings = ["scheduler=constant", "trainer.log_every_n_steps=1"]
    folder = copied(runs(3, *settings, "trainer.accumulate_grad_batches=2"))
    command = [*short(tiny, pairs, folder, 3), *settings]
    counted = "+callbacks.count={_target_: tests.support.probes.CountBatches, file: " + f"{tmp_path / 'counts'}}}"
    more = ["ckpt_path=last", "trainer.max_steps=5", "trainer.accumulate_grad_batches=4", counted]
    assert "note: trainer.accumulate_grad_batches was 2 in" in run("train", *command, *more).text
    assert (tmp_path / "counts").read_text().split() == ["4:4", "5:4"]


def test_all_that_changed_is_noted_when_a_run_is_resumed(run, gallery, copied, tiny, pairs, tmp_path):
    root = shutil.copytree(pairs, tmp_path / "pairs")
    command = short(tiny, root, copied(gallery("plain")), 2)
    more = photograph("coffee", 32, 32)
    for folder in ("training_images", "control_images"):
        more.save(root / folder / "more.png")
    shutil.copy(root / "training_images" / "00.txt", root / "training_images" / "more.txt")
    changed = {
        "seed": ("42", "7"),
        "trainer.max_steps": ("2", "3"),
        "trainer.gradient_clip_val": ("1.0", "0.5"),
        "trainer.precision": ("32-true", "bf16-mixed"),
        "data.val_count": ("0", "2"),
        "data.caption_dropout_rate": ("0.0", "0.5"),
        "model.timesteps.shift": ("None", "3.0"),
        "objective.mask.outside": ("0.0", "0.5"),
        "save_every": ("200", "5"),
        "scheduler.name": ("constant_with_warmup", "cosine"),
    }
    overrides = [f"{key}={now}" for key, (_, now) in changed.items()]
    text = run("train", *command, *overrides, "ckpt_path=last", "model.dtype=bfloat16").text
    for key, (was, now) in changed.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"note: {key} was ")]
        assert line == f"note: {key} was {was} in {tmp_path / 'run'} and is {now} now"
    assert "note: the run had 8 training samples; these 7 are not the same" in text


@pytest.mark.parametrize("how", first(1, ["ckpt_path=last", "resume=auto", "newest", "ckpt_path=PATH"]))
def test_a_run_that_is_only_named_is_resumed_with_its_own_settings(run, runs, copied, tmp_path, monkeypatch, how):
    settings = ["adapter.target_modules=[attn.to_q]", "optimizer=adamw_schedule_free", "seed=5"]
    whole, folder = runs(3, *settings).folder, copied(runs(2, *settings), "outputs/it's a run=mine")
    monkeypatch.chdir(tmp_path)
    path = folder / "checkpoints" / "last.ckpt"
    places = [f"output_dir={folder}"] if "=" in how and "PATH" not in how else []
    resume = {"newest": "ckpt_path=last", "ckpt_path=PATH": f"ckpt_path={path}"}.get(how, how)
    text = run("train", resume, *places, "trainer.max_steps=3").text
    assert [line for line in text.splitlines() if "note: " in line] == [
        f"note: trainer.max_steps was 2 in {folder if 'PATH' in how else shorten(folder)} and is 3 now"
    ]
    resumed = folder
    if "PATH" in how:  # it branches off into a folder of its own
        [resumed] = (one for one in folder.parent.iterdir() if one != folder)
    assert lora_bytes(resumed) == lora_bytes(whole)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ckpt_path=last", "data.root=x"],
        ["ckpt_path=last", "+model=flux_kontext"],
        ["ckpt_path=last", "model/quantization=fp8"],
        ["ckpt_path=last", "-m"],
        ["ckpt_path=last", "-cn", "config"],
        ["ckpt_path=null"],
        ["resume=auto"],
        ["optimizer.lr=1"],
        ["ckpt_path=[", "resume=auto"],
    ],
)
def test_a_command_with_settings_of_its_own_keeps_them(arguments, tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    run.config.touch()
    given = [f"output_dir={tmp_path}", *arguments]
    own = given if arguments != ["resume=auto"] else ["-cp", str(tmp_path), "-cn", "config", *given]
    assert with_run_settings(given) == own


def test_a_changed_setting_of_a_finished_run_is_answered(run, gallery, copied, tiny, pairs):
    command = [*short(tiny, pairs, copied(gallery("plain")), 2), "resume=auto"]
    error = run("train", *command, "optimizer.lr=1e-2", "adapter.alpha=3", ok=False).error
    assert "optimizer.lr was 0.0001 in" in error
    assert "adapter.alpha was " in error
    text = run("train", *command, "seed=7").text
    assert "note: seed was 42 in" in text
    assert "nothing to do" in text


def test_notes_of_changed_settings_show_no_secrets(tmp_path, monkeypatch):
    noted = []
    monkeypatch.setattr(resuming.log, "info", noted.append)
    groups: dict = {group: {} for group in ("adapter", "optimizer", "scheduler", "model")}
    former, now = (
        {**groups, "logger": {"api_key": key}, "data": {"root": f"s3://me:{key}@host/x"}} for key in ("old", "new")
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(former))
    check_resumable(now, RunFolder(tmp_path))
    assert noted == [
        f"note: data.root was s3://***@host/x in {tmp_path} and is s3://***@host/x now",
        f"note: logger.api_key was *** in {tmp_path} and is *** now",
    ]


def test_what_was_learned_is_kept_when_a_run_fails(run, tiny, pairs, tmp_path):
    """Between two savings, and although the failing picture was fine when the run started."""
    arguments = [*short(tiny, pairs, tmp_path / "run", 9), "save_every=0"]
    settings = [
        "optimizer.lr=1e20",
        "scheduler=constant",
        "model.optimization.max_nonfinite_steps=2",
        "trainer.log_every_n_steps=3",
    ]
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


def test_the_same_command_starts_a_run_resumes_it_and_says_that_it_is_finished(run, runs, start, tiny, pairs, tmp_path):
    settings = ["save_every=2", "scheduler=constant"]
    folder = tmp_path / "run"
    command = [*short(tiny, pairs, folder, 6), *settings, "resume=auto"]
    process = start("train", *command, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 5}")
    kill_when((folder / "checkpoints" / "step-000002.ckpt").exists, process)
    assert "nothing to do" not in run("train", *command).text
    assert lora_bytes(folder) == lora_bytes(runs(6, *settings).folder)

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    finished = run("train", *command)
    assert f"nothing to do: {folder} is finished, at step 6 of trainer.max_steps=6" in finished.text
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    run("train", *command, "trainer.max_steps=8")
    assert [row["step"] for row in metrics(folder)] == [str(n) for n in range(1, 9)]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.ckpt", "step-000006.ckpt"}


@pytest.mark.parametrize("setting", ["ckpt_path=last", "resume=always"])
def test_resume_that_cannot_be_is_refused(refuses, setting):
    refuses("resume=auto", setting, words="leave ckpt_path=last out" if setting == "ckpt_path=last" else "choose auto")


def test_resume_needs_the_name_of_the_folder(run, tiny, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [one for one in short(tiny, pairs, tmp_path, 2) if "output_dir" not in one]
    assert "resume=auto needs output_dir=FOLDER" in run("train", *arguments, "resume=auto", ok=False).error


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, runs, copied, tiny, pairs):
    """The damaged checkpoint also does not replace the good one at the next save."""
    settings = ["save_every=2", "scheduler=constant"]
    folder = copied(runs(6, *settings, "keep_checkpoints=3"))
    command = [*short(tiny, pairs, folder, 6), *settings, "keep_checkpoints=3", "resume=auto"]
    checkpoints = folder / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"last.ckpt", "step-000002.ckpt", "step-000004.ckpt"}
    content = bytearray((checkpoints / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoints / "last.ckpt").write_bytes(content)
    os.truncate(checkpoints / "step-000004.ckpt", 1000)
    text = run("train", *command, "trainer.max_steps=8").text
    assert "last.ckpt is damaged (checksum of" in text
    assert "step-000004.ckpt is damaged (its end is missing, or it is no checkpoint); " in text
    assert "step-000002.ckpt is tried" in text
    assert lora_bytes(folder) == lora_bytes(runs(8, *settings).folder)
    kept = {path.name: torch.load(path, weights_only=True)["global_step"] for path in checkpoints.iterdir()}
    assert kept == {"last.ckpt": 8, "step-000006.ckpt": 6, "step-000004.ckpt": 4}


def test_checkpoints_that_a_killed_run_kept_too_many_are_removed(run, runs, copied, tiny, pairs):
    folder = copied(runs(3, "save_every=1", "keep_checkpoints=3"))
    (folder / "finished.json").unlink()
    run("train", *short(tiny, pairs, folder, 3), "save_every=1", "keep_checkpoints=2", "resume=auto")
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "step-000002.ckpt"}


def test_every_flipped_bit_of_a_checkpoint_is_found_or_changes_nothing(gallery, copied):
    run = RunFolder(copied(gallery("plain")))
    path = run.checkpoint
    whole, content = torch.load(path, weights_only=True), path.read_bytes()
    found = 0
    for place in range(0, len(content), len(content) // 60):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            find_checkpoint("last", None, run)
        except UserError:
            found += 1
        else:
            assert str(torch.load(path, weights_only=True)) == str(whole)
    assert found > 30


def test_a_run_that_was_killed_in_its_first_saving_starts_anew(run, start, tiny, pairs, tmp_path):
    """Its weights exist, its checkpoint does not."""
    command = [*short(tiny, pairs, tmp_path / "run", 4), "save_every=2", "resume=auto"]
    process = start("train", *command, before=kill_before_the_first_checkpoint)
    process.wait(60)
    assert process.returncode == -signal.SIGKILL
    weights, checkpoints = tmp_path / "run" / "lora" / "last", tmp_path / "run" / "checkpoints"
    assert weights.is_dir()
    assert not (checkpoints / "last.ckpt").exists()
    assert "it is started again" in run("train", *command).text
    assert {path.name for path in checkpoints.iterdir()} == {"last.ckpt", "step-000002.ckpt"}
    # Without that trace the weights may be all that is left of a run.
    shutil.rmtree(checkpoints)
    (tmp_path / "run" / "finished.json").unlink()
    assert "without a checkpoint: choose another folder" in run("train", *command, ok=False).error


def test_a_run_whose_first_saving_fails_starts_anew(run, runs, tiny, pairs, tmp_path):
    """The disk has room for its weights but not for its checkpoint."""
    command = [*short(tiny, pairs, tmp_path / "run", 4), "save_every=2", "resume=auto"]
    whole = runs(4, "save_every=2").folder
    room = (whole / "checkpoints" / "last.ckpt").stat().st_size - 1000
    assert room > len(lora_bytes(whole))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        error = run("train", *command, ok=False).error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in error
    assert (tmp_path / "run" / "lora" / "last").is_dir()
    assert "it is started again" in run("train", *command).text
    assert lora_bytes(tmp_path / "run") == lora_bytes(whole)


def test_what_a_killed_saving_leaves_is_removed(run, gallery, copied, tiny, pairs):
    folder = copied(gallery("plain"))
    left = [
        folder / ".config.yaml.1.tmp",
        folder / "lora" / "last" / ".weights.safetensors.1.tmp",
        folder / "model" / ".last.1.tmp" / "weights",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    run("train", *short(tiny, pairs, folder, 3), "ckpt_path=last")
    assert not list(folder.rglob(".*.tmp"))


@pytest.mark.parametrize("resume", first(1, [True, False]))
def test_slurm_queues_a_job_again_that_it_tells_to_end(start, tiny, pairs, tmp_path, monkeypatch, resume):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder = tmp_path / "run"
    settings = ["save_every=0", "scheduler=constant", *(["resume=auto"] if resume else [])]
    process = start("train", *short(tiny, pairs, folder, 10_000), *settings)
    wait_until(lambda: (folder / "metrics.csv").is_file() and (folder / "metrics.csv").stat().st_size > 200, process)
    os.killpg(process.pid, signal.SIGUSR1)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, text
    assert "Traceback" not in text
    if not resume:
        assert not (tmp_path / "asked").exists()
        assert "job 17 is not queued again: that takes resume=auto" in text
        return
    assert "saved in" in text
    assert "resume with the same command; job 17 is queued again" in text
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
