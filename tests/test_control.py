"""Requests to a running run: save, sample, stop."""

import re
import shutil
import signal

import pytest
import torch

from runs.run_folder import REQUESTS, RunFolder
from tests.support.commands import lora_bytes, metrics, rows, short, wait_until
from tests.support.gallery import SHOWN
from tests.support.several_runs import DDP, start_two

ASK = "+callbacks.ask={_target_: tests.support.probes.Ask, steps: {%s}}"
STOPPED = 128 + signal.SIGINT


@pytest.mark.slow
def test_run_that_is_asked_to_save_sample_and_stop_resumes_bitwise(run, start, tiny, pairs, tmp_path):
    settings = [*SHOWN, "sample_every=0", "save_every=0", "trainer.accumulate_grad_batches=2"]
    folder = tmp_path / "run"
    asked, command = RunFolder(folder), [*short(tiny, pairs, folder, 10_000, shown=True), *settings]
    process = start("train", *command)
    wait_until(lambda: (folder / "metrics.csv").exists() and metrics(folder), process)
    for name in ("sample", "save"):
        asked.ask(name)
        wait_until(lambda name=name: not (asked.requests / name).exists(), process)
    [_, sampled], [_] = asked.sampled_steps(), asked.saved_steps("lora")
    asked.ask("stop")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, text
    step = torch.load(asked.checkpoint, weights_only=True)["global_step"]
    assert f"stopped by {asked.requests / 'stop'} after step {step}, saved in {folder}; resume" in text
    assert not asked.requests.exists()
    assert len(list(asked.samples_of(sampled).glob("*.png"))) == 2
    assert [row["step"] for row in rows(folder)] == [0, sampled]
    assert f"step {sampled}" in asked.report.read_text()

    whole = tmp_path / "whole"
    run("train", *command, f"trainer.max_steps={step + 2}", "ckpt_path=last")
    run("train", *short(tiny, pairs, whole, step + 2, shown=True), *settings)
    assert lora_bytes(folder) == lora_bytes(whole)
    losses = [[row["loss"] for row in metrics(one)] for one in (folder, whole)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_requests_of_an_earlier_process_are_removed_and_other_files_are_noted_once(run, gallery, tiny, pairs, tmp_path):
    """Fulfilled requests change neither training nor the later samples; a checkpoint between two windows is exact."""
    folder, whole = RunFolder(tmp_path / "run"), gallery("shown").folder
    folder.requests.mkdir(parents=True)
    for name in (*REQUESTS, "pause"):
        (folder.requests / name).touch()
    command = [*short(tiny, pairs, folder, 4, shown=True), *SHOWN, "save_every=0", "keep_checkpoints=3"]
    text = run("train", *command, ASK % "3: [save, sample]").text
    assert text.count(f"note: {folder.requests / 'pause'} is not a request. Use save, sample, stop.") == 1
    assert [path.name for path in folder.requests.iterdir()] == ["pause"]
    assert not [name for name in folder.files() if "requests" in name]
    assert [*folder.sampled_steps()] == [0, 2, 3, 4]
    assert [row["step"] for row in rows(folder.path)] == [0, 2, 3, 4]
    assert [*folder.saved_steps("lora")] == [3, 4]
    assert lora_bytes(folder.path) == lora_bytes(whole)
    assert [row for row in rows(folder.path) if row["step"] != 3] == rows(whole)

    (folder.requests / "pause").unlink()
    checkpoint = f"ckpt_path={shutil.copy(folder.checkpoint_of(3), tmp_path)}"
    run("train", *short(tiny, pairs, tmp_path / "branch", 4, shown=True), *SHOWN, checkpoint)
    assert lora_bytes(tmp_path / "branch") == lora_bytes(whole)


@pytest.mark.slow
def test_a_requested_stop_is_not_queued_again_and_comes_after_other_requests(run, tiny, pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    arguments = [*short(tiny, pairs, tmp_path / "run", 9), "save_every=0", "resume=auto"]
    outcome = run("train", *arguments, ASK % "2: [stop, save, signal]", ok=False)
    assert outcome.status == STOPPED
    assert "queued" not in outcome.text
    assert [*RunFolder(tmp_path / "run").saved_steps("lora")] == [2]
    finished = run("train", *arguments, "trainer.max_steps=4", ASK % "4: [stop]")
    assert "done:" in finished.text, "the last step ends the run by itself"


@pytest.mark.parametrize("more", [[], ["ema.half_life=2"]])
def test_the_newest_files_are_kept_and_their_size_is_that_of_the_estimate(run, tiny, pairs, tmp_path, more):
    settings = [*short(tiny, pairs, tmp_path / "run", 4), "save_every=1", "adapter.rank=32", *more]
    command = [*settings, "keep_lora_files=2", "keep_checkpoints=2"]
    [plan] = re.findall("│ disk.*", run("train", *command, "task=dry_run").text)
    run("train", *command)
    names = {path.name for path in (tmp_path / "run/lora").iterdir()}
    seconds = {"step-000003-raw", "step-000004-raw", "last-raw"} if more else set()
    assert names == {"step-000003", "step-000004", "last"} | seconds
    sizes = {"weights": sum(path.stat().st_size for path in (tmp_path / "run/lora").rglob("*.safetensors"))}
    sizes["weights"] *= 4 / 3  # the estimate includes best
    sizes["checkpoints"] = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints").glob("*.ckpt")) * 3 / 2
    units = {"kB": 1e3, "MB": 1e6, "bytes": 1}
    for name, size in sizes.items():
        figure, unit = re.search(rf"{name} ([\d.]+) (\w+)", plan).groups()
        assert size / 1.25 < float(figure) * units[unit] < size * 1.1, name


def test_only_a_run_that_trains_takes_requests(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(FileNotFoundError):
        folder.ask("stop")
    with pytest.raises(ValueError, match="tuple"):
        folder.ask("../config.yaml")


@pytest.mark.slow
def test_requested_measurements_do_not_stop_a_run_early(run, tiny, pairs, tmp_path):
    settings = [*SHOWN, "optimizer.lr=0", "callbacks.validation.patience=1", "early_stopping=true", "save_every=0"]
    command = [*short(tiny, pairs, tmp_path / "run", 9, shown=True), *settings, "callbacks.report=null"]
    text = run("train", *command, ASK % "3: [sample]").text
    assert "early stopping after step 4: " in text
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 2, 3, 4]


@pytest.mark.slow
def test_a_sweep_continues_after_a_job_is_stopped_by_request(run, tiny, pairs, tmp_path):
    folder = tmp_path / "sweep"
    asks = ["+callbacks.ask._target_=tests.support.probes.Ask", "+callbacks.ask.steps={1: [stop]},{9: [stop]}"]
    outcome = run("train", "-m", *short(tiny, pairs, folder, 3), "save_every=0", *asks, ok=False)
    assert outcome.status == 1
    errors = [row["error"] for row in metrics(folder, "sweep.csv")]
    assert errors[0].startswith(f"stopped by {folder / '0' / 'requests' / 'stop'} after step 1, saved in")
    assert errors[1] == ""
    assert not RunFolder(folder / "0").finished.exists()
    assert RunFolder(folder / "1").finished.exists()


@pytest.mark.slow
def test_all_processes_act_in_the_same_step(run, start, tiny, pairs, tmp_path):
    def command(name, steps):
        return [*short(tiny, pairs, tmp_path / name, steps, shown=True), *SHOWN, "save_every=0", *DDP]

    folder = RunFolder(tmp_path / "run")
    asks = ASK % "3: [sample, save], 4: [stop]"
    processes = start_two(start, [[*command("run", 9), asks]])
    text = "".join(process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [STOPPED] * 2, text
    assert text.count(f"stopped by {folder.requests / 'stop'} after step 4") == 1
    assert not folder.requests.exists()
    assert [*folder.sampled_steps()] == [0, 2, 3, 4]
    assert [row["step"] for row in rows(folder.path)] == [0, 2, 3, 4]
    assert [*folder.saved_steps("lora")] == [3, 4]
    resumed = [*command("run", 5), "ckpt_path=last"]
    processes = start_two(start, [resumed, command("whole", 5)])
    text = "".join(process.communicate(timeout=120)[0] for process in processes)
    assert lora_bytes(folder.path) == lora_bytes(tmp_path / "whole"), text
