"""Runs that were stopped, killed or ended, and go on."""

import math
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from diffusers.optimization import get_cosine_schedule_with_warmup
from omegaconf import OmegaConf
from torch.optim import lr_scheduler

from cli import resuming
from cli.arguments import with_run_settings
from cli.resuming import check_resumable, check_resume, find_checkpoint
from foundation.errors import UserError
from lightning_modules.optimization import Optimization
from runs.config_file import write_config
from runs.run_folder import RunFolder, shorten
from tests.support.combinations import first
from tests.support.commands import compose, kill_when, lora_bytes, metrics, short, wait_until
from tests.support.gallery import SHOWN
from tests.support.harm import disk_with
from tests.support.pictures import make_pairs


def test_resumed_run_is_bitwise_the_uninterrupted_one_after_kill_9(run, start, tiny, tmp_path):
    """The run is killed within an epoch, with mixed sizes, accumulation and dropouts; data workers change nothing."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32), (32, 32), (48, 32), (32, 48)])
    settings = ["trainer.accumulate_grad_batches=2", "data.batch_size=2", "data.num_workers=2", "save_every=3"]
    settings += ["data.caption_dropout_rate=0.3", "data.reference_dropout=0.3", "scheduler.num_warmup_steps=2"]
    run("train", *short(tiny, root, tmp_path / "whole", 6), *settings, "data.num_workers=0")
    killed = [*short(tiny, root, tmp_path / "killed", 6), *settings]
    process = start("train", *killed, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 5}")
    kill_when((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists, process)
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "killed", "step-000003")
    run("train", *killed, "ckpt_path=last")
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "whole")
    assert lora_bytes(tmp_path / "whole", "step-000003") != lora_bytes(tmp_path / "whole")
    resumed, whole = ([(row["step"], row["loss"]) for row in metrics(tmp_path / name)] for name in ("killed", "whole"))
    assert resumed == whole
    assert [step for step, _ in whole] == [str(step) for step in range(1, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw_schedule_free", "adamw_8bit", "prodigy"])
def test_resume_is_bitwise_for_other_optimizers(run, runs, copied, tiny, pairs, optimizer):
    settings = [f"optimizer={optimizer}", "scheduler=constant"]
    folder = copied(runs(2, *settings))
    run("train", *short(tiny, pairs, folder, 4), *settings, "ckpt_path=last")
    assert lora_bytes(folder) == lora_bytes(runs(4, *settings).folder)


@pytest.mark.slow
def test_signal_saves_and_the_run_resumes_exactly(run, start, tiny, pairs, tmp_path):
    """The whole process group gets the signal, as from a terminal or a cluster, within an accumulation window."""
    settings = ["trainer.accumulate_grad_batches=3", "save_every=0", "scheduler=constant", "data.num_workers=2"]
    folder = tmp_path / "a stopped run"
    stopped = [*short(tiny, pairs, folder, 10_000), *settings]
    process = start("train", *stopped)
    wait_until((folder / "metrics.csv").exists, process)
    wait_until(lambda: len(metrics(folder)) > 1, process)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "Traceback" not in text
    assert "stopped by SIGTERM after step" in text
    goes_on = shlex.split(text.partition("resume with the same command and ")[2].splitlines()[0])
    assert goes_on == [f"output_dir={folder}", "ckpt_path=last"]
    step = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"]
    run("train", *stopped, *goes_on, f"trainer.max_steps={step + 2}")
    run("train", *short(tiny, pairs, tmp_path / "whole", step + 2), *settings)
    assert lora_bytes(folder) == lora_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_run_killed_after_its_last_checkpoint_gets_its_end(run, gallery, copied, tiny, pairs):
    """The resumed run adds its last images, their metrics and its report."""
    folder = copied(gallery("shown"))
    table, images = folder / "validation.csv", folder / "samples" / "step-000004"
    before = {path: path.read_bytes() for path in (table, folder / "grid.png", *images.glob("*.png"))}
    assert len(before) == 4
    weights = lora_bytes(folder)
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(images)
    (folder / "grid.png").unlink()
    (folder / "report.html").unlink()
    command = [*short(tiny, pairs, folder, 4, shown=True), *SHOWN, "ckpt_path=last"]
    assert "nothing to do" in run("train", *command).text
    assert {path: path.read_bytes() for path in before} == before
    assert "http-equiv" not in (folder / "report.html").read_text(), "a finished report waits for nothing"
    assert lora_bytes(folder) == weights


@pytest.mark.slow
def test_run_without_a_checkpoint_starts_from_scratch(run, tiny, pairs, tmp_path, monkeypatch):
    """A second signal ended it before its first checkpoint."""
    monkeypatch.setattr("runs.signals.DEBOUNCE", 0.0)
    folder = tmp_path / "run"
    arguments = [*short(tiny, pairs, folder, 400), "save_every=0", "trainer.log_every_n_steps=1"]
    stop = "+callbacks.stop={_target_: tests.support.probes.StopAt, step: 2, signals: [SIGINT, SIGTERM]}"
    outcome = run("train", *arguments, stop, ok=False)
    assert outcome.status == 128 + signal.SIGINT
    assert "stopped by SIGINT; nothing to save" in outcome.text
    error = run("train", *arguments, "ckpt_path=last", ok=False).error
    assert "the run has saved nothing: leave ckpt_path out to start it again" in error
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert "it is started again" in run("train", *arguments, "trainer.max_steps=2").text
    assert [row["step"] for row in metrics(folder)] == ["1", "2"]
    assert not (folder / "samples").exists()
    assert (folder / "notes.txt").exists()


@pytest.fixture
def compare(gallery, tiny, pairs, monkeypatch):
    """Compare settings with those of a run; returns what is noted."""
    run, noted = RunFolder(gallery("plain").folder), []
    monkeypatch.setattr(resuming.log, "info", noted.append)

    def compare(*changed):
        cache = f"data.cache_dir={OmegaConf.load(run.config).data.cache_dir}"  # of the worker that made the run
        cfg = compose("train", *short(tiny, pairs, run.path, 2), cache, *changed)
        check_resumable(OmegaConf.to_container(cfg), run)
        return [note.replace(f" in {run}", "") for note in noted]

    return compare


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optimizer.lr=1e-2"], "optimizer.lr was 0.0001 in .*adapter.init_from="),
        (["objective=slider"], "objective._target_ was .*adapter.init_from="),
        (["adapter.rank_pattern={*:2}"], "adapter.rank_pattern"),
        (["optimizer.lr=1", "adapter.alpha=3"], "adapter.alpha was .*optimizer.lr was"),
        (["ema.half_life=5"], "ema.half_life was None"),
    ],
)
def test_a_setting_that_the_checkpoint_would_restore_cannot_change(compare, settings, words):
    with pytest.raises(UserError, match=f"cannot resume with a changed setting: {words}"):
        compare(*settings)


def test_other_changed_settings_are_noted_with_their_values_and_computed_ones_are_not(compare):
    notes = compare("trainer.max_steps=9", "model.timesteps.shift=3.0", "seed=7")
    assert notes == [
        "note: model.timesteps.shift was None and is 3.0 now",
        "note: seed was 42 and is 7 now",
        "note: trainer.max_steps was 2 and is 9 now",
    ]


@pytest.mark.slow
def test_extended_run_takes_the_new_schedule_accumulation_and_samples_from_its_first_step(
    run, runs, copied, tiny, pairs, tmp_path
):
    settings = ["scheduler=cosine", "optimizer.lr=0.003", "adapter.lora_plus_ratio=4"]
    past = runs(2, *settings)
    folder = copied(past)
    assert past.text.count("it loads in ComfyUI and diffusers") == 1
    table = folder / "metrics.csv"
    former = metrics(folder)[-1]["seconds"]
    table.write_text(table.read_text().replace(f",{former}\n", ",3600\n"))  # it took an hour
    counted = "+callbacks.count={_target_: tests.support.probes.CountBatches, file: " + f"{tmp_path / 'counts'}}}"
    root = shutil.copytree(pairs, tmp_path / "pairs")
    for path in root.rglob("00.*"):
        path.rename(path.with_stem("more"))
    changed = ["trainer.accumulate_grad_batches=2", "data.val_count=2", counted, "ckpt_path=last"]
    text = run("train", *short(tiny, root, folder, 4), *settings, *changed).text
    assert "note: the run had 8 training samples; these 6 are not the same" in text
    assert "it loads in" not in text
    assert all(3600 < float(row["seconds"]) < 3700 for row in metrics(folder)[2:])
    rates = [float(row["lr"]) for row in metrics(folder)][2:]
    assert rates == pytest.approx([0.5 * 0.003 * (1 + math.cos(math.pi * step / 4)) for step in range(2, 4)], rel=1e-5)
    assert (tmp_path / "counts").read_text().split() == ["3:2", "4:2"]
    for note in ("trainer.max_steps was 2 in", "trainer.accumulate_grad_batches was 1 in"):
        assert f"note: {note}" in text


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, steps: get_cosine_schedule_with_warmup(optimizer, steps // 4, steps),
        lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, [0.3, 1.2], total_steps=steps),
        lambda optimizer, steps: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, steps)],
            [steps // 3],
        ),
    ],
    ids=["warmup", "one cycle", "sequential"],
)
@pytest.mark.parametrize("steps", [8, 12, 20])
def test_a_resumed_schedule_has_the_rates_and_momenta_of_an_uninterrupted_one(schedule, steps):
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


@pytest.mark.parametrize("how", first(1, ["ckpt_path=last", "newest", "ckpt_path=PATH"]))
def test_a_run_that_is_only_named_is_resumed_with_its_own_settings(run, runs, copied, tmp_path, monkeypatch, how):
    settings = ["adapter.target_modules=[attn.to_q]", "optimizer=adamw_schedule_free", "seed=5"]
    whole, folder = runs(2, *settings).folder, copied(runs(1, *settings), "outputs/it's a run=mine")
    monkeypatch.chdir(tmp_path)
    branches = how == "ckpt_path=PATH"  # into a folder of its own
    path = folder / "checkpoints" / "last.ckpt" if branches else "last"
    places = [f"output_dir={folder}"] if how == "ckpt_path=last" else []
    text = run("train", f"ckpt_path={path}", *places, "trainer.max_steps=2").text
    assert [line for line in text.splitlines() if "note: " in line] == [
        f"note: trainer.max_steps was 1 in {folder if branches else shorten(folder)} and is 2 now"
    ]
    [resumed] = (one for one in folder.parent.iterdir() if (one != folder) == branches)
    assert lora_bytes(resumed) == lora_bytes(whole)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ckpt_path=last", "data.root=x"],
        ["ckpt_path=last", "+model=flux_kontext"],
        ["ckpt_path=last", "-m"],
        ["ckpt_path=last", "-cn", "config"],
        ["resume=auto"],
        ["optimizer.lr=1"],
        ["ckpt_path=[", "resume=auto"],
    ],
)
def test_a_command_with_settings_of_its_own_keeps_them(arguments, tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    write_config(run.config, {})
    given = [f"output_dir={tmp_path}", *arguments]
    *added, name = with_run_settings(given)[: -len(given)] or [None]
    assert with_run_settings(given)[-len(given) :] == given
    assert name == ("config" if arguments == ["resume=auto"] else None)
    assert not added or (Path(added[1]) / "config.yaml").read_bytes() == run.config.read_bytes()


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


def test_the_same_command_starts_a_run_resumes_it_and_says_that_it_is_finished(run, runs, copied, tiny, pairs):
    settings = ["save_every=1", "scheduler=constant", "keep_checkpoints=3"]
    folder = copied(runs(3, *settings))
    command = [*short(tiny, pairs, folder, 4), *settings, "resume=auto"]
    assert "nothing to do" not in run("train", *command).text
    assert lora_bytes(folder) == lora_bytes(runs(4, *settings).folder)
    assert [row["step"] for row in metrics(folder)] == ["1", "2", "3", "4"]
    kept = {"last.ckpt", "step-000002.ckpt", "step-000003.ckpt"}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == kept
    (folder / "log.txt").unlink()  # which tells of each command
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    finished = run("train", *command)
    assert f"nothing to do: {folder} is finished, at step 4 of trainer.max_steps=4" in finished.text
    (folder / "log.txt").unlink()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["resume=auto", "ckpt_path=last"], "leave ckpt_path=last out"),
        (["resume=always"], "choose auto"),
        (["resume=auto"], "resume=auto needs output_dir=FOLDER"),
    ],
)
def test_resume_that_cannot_be_is_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        check_resume(compose("train", *overrides))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, runs, copied, tiny, pairs):
    """The damaged checkpoint does not replace the good one at the next save; unfinished files are removed."""
    settings = ["save_every=1", "scheduler=constant", "keep_checkpoints=3"]
    folder = copied(runs(3, *settings))
    checkpoints = folder / "checkpoints"
    content = bytearray((checkpoints / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoints / "last.ckpt").write_bytes(content)
    os.truncate(checkpoints / "step-000002.ckpt", 1000)
    (folder / "model").mkdir()
    for left in (".config.yaml.1.tmp", "lora/last/.weights.safetensors.1.tmp", "model/.last.1.tmp"):
        (folder / left).write_text("")
    text = run("train", *short(tiny, pairs, folder, 4), *settings, "resume=auto").text
    assert "last.ckpt is damaged (checksum of" in text
    assert "step-000002.ckpt is damaged (File is not a zip file); " in text
    assert "step-000001.ckpt is tried" in text
    assert not list(folder.rglob(".*.tmp"))
    assert lora_bytes(folder) == lora_bytes(runs(4, *settings).folder)
    kept = {path.name: torch.load(path, weights_only=True)["global_step"] for path in checkpoints.iterdir()}
    assert kept == {"last.ckpt": 4, "step-000003.ckpt": 3, "step-000002.ckpt": 2}


def test_every_flipped_bit_of_a_checkpoint_is_found_or_changes_nothing(gallery, copied):
    run = RunFolder(copied(gallery("plain")))
    path = run.checkpoint
    whole, content = torch.load(path, weights_only=True), path.read_bytes()
    found = 0
    for place in range(0, len(content), len(content) // 12):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            find_checkpoint("last", None, run)
        except UserError:
            found += 1
        else:
            assert str(torch.load(path, weights_only=True)) == str(whole)
    assert found > 6


@pytest.mark.slow
def test_a_run_whose_first_checkpoint_fails_starts_from_scratch(run, runs, tiny, pairs, tmp_path):
    """The disk has room for its weights but not for its checkpoint."""
    folder = tmp_path / "run"
    command = [*short(tiny, pairs, folder, 2), "resume=auto"]
    whole = runs(2).folder
    room = (whole / "checkpoints" / "last.ckpt").stat().st_size - 1000
    assert room > len(lora_bytes(whole))
    with disk_with(room):
        error = run("train", *command, ok=False).error
    assert "cannot write" in error
    assert (folder / "lora" / "last").is_dir()
    assert "it is started again" in run("train", *command).text
    assert lora_bytes(folder) == lora_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (["resume=auto"], "resume with the same command; job 17 is queued again"),
        ([], "job 17 is not queued again: that takes resume=auto"),
    ],
)
def test_slurm_requeues_a_job_that_it_ends(run, tiny, pairs, tmp_path, monkeypatch, resume, words):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    stop = "+callbacks.stop={_target_: tests.support.probes.StopAt, step: 1, signals: [SIGUSR1]}"
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 9), "save_every=0", stop, *resume, ok=False)
    assert outcome.status == 128 + signal.SIGUSR1
    assert words in outcome.text
    assert not resume or (tmp_path / "asked").read_text() == "requeue 17\n"
    assert resume or not (tmp_path / "asked").exists()
