"""The processes of a run end together: torchrun and Lightning stop the others when one fails."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.support.commands import ROOT, short, wait_until
from tests.support.several_runs import DDP, start_ranks, start_two

pytestmark = pytest.mark.slow

LOST = "another process of this run has ended. Its own line says why; if it has none, it was killed"


@pytest.fixture
def failing(tiny, pairs, tmp_path):
    """Overrides of a run that saves each step and fails in its second."""

    def failing(**how):
        settings = ", ".join(f"{name}: {value}" for name, value in how.items())
        fail = f"+callbacks.fail={{_target_: tests.support.probes.Fail, {settings}}}"
        return [*short(tiny, pairs, tmp_path / "run", 6), "trainer.strategy=ddp", "save_every=1", fail]

    return failing


@pytest.fixture
def launch(tmp_path):
    """Start train.py in two processes, by torchrun or by Lightning."""
    started = []

    def launch(launcher, overrides):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = torchrun if launcher == "torchrun" else []
        arguments = [*overrides, *([] if command else ["trainer.devices=2"])]
        command = [sys.executable, *command, str(ROOT / "train.py"), *map(str, arguments)]
        with (tmp_path / "log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    yield launch
    for process in started:
        for one in members(process.pid):
            one.kill()
        process.wait()


def members(session):
    """Return the running processes of a session, without those that imitate a hanging library."""
    found = []
    for one in psutil.process_iter():
        try:
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE and one.name() != "sleep":
                found.append(one)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize(
    ("launcher", "rank", "how", "others"),
    [("torchrun", 0, "kill", "step"), ("lightning", 1, "mistake", "hang")],
)
def test_all_end_when_one_fails(launch, failing, tmp_path, launcher, rank, how, others):
    """Cases: a step of gloo, and a library that does not return, like NCCL when a process is missing."""
    process = launch(launcher, failing(rank=rank, how=how, others=others))
    wait_until((tmp_path / "run" / "failed").exists, process, 150)
    failed = (tmp_path / "run" / "failed").stat().st_mtime
    while members(process.pid) and time.time() - failed < 60:
        process.poll()
        time.sleep(0.1)
    seconds = time.time() - failed
    status, text = process.wait(60), (tmp_path / "log").read_text()
    print(f"{launcher}: all ended {seconds:.1f} s after {how} of process {rank}, status {status}")
    assert seconds < 20, text
    assert status, text
    line = "Signal 9 (SIGKILL) received by PID" if how == "kill" else "pair 7 is damaged: delete it"
    assert text.count(line) == 1, text
    assert "Error executing job" not in text, text
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1


def test_a_process_that_hangs_after_another_ended_is_killed(start, failing, tmp_path):
    """Processes such as srun starts, which stops none when another fails."""
    hang = "+callbacks.hang._target_=tests.support.probes.HangAtTheEnd"
    first, _ = start_two(start, [[*failing(rank=1, how="kill"), "trainer.devices=2", hang]])
    text, _ = first.communicate(timeout=150)
    assert first.returncode == 1, text
    assert time.time() - (tmp_path / "run" / "failed").stat().st_mtime < 20, text
    assert "in _teardown" in text, "where it hangs"


def test_a_run_ends_with_its_stacks_when_one_of_its_processes_hangs(start, tiny, pairs, tmp_path):
    """A stopped process: the other one waits for it, and notices."""
    hold = "+callbacks.hold={_target_: tests.support.hold.Hold, step: 2, marker: " + str(tmp_path / "held") + "}"
    arguments = [*short(tiny, pairs, tmp_path / "run", 100), *DDP, "save_every=1", "watchdog_minutes=0.05", hold]
    first, second = start_two(start, [arguments])
    wait_until((tmp_path / "held").exists, first)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        text, _ = second.communicate(timeout=60)
        assert second.returncode == 1, text
        assert "most recent call first" in text
        assert "error: nothing was done for 0.05 minutes (watchdog_minutes): where it waits is above" in text
        assert not (tmp_path / "run" / "finished.json").exists()
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.communicate(timeout=60)
    assert first.returncode == 1
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] in (1, 2)


def test_processes_that_see_different_folders_are_refused(start, tiny, pairs, tmp_path):
    """Otherwise one would resume from a checkpoint and the other start afresh."""
    done = start("train", *short(tiny, pairs, tmp_path / "0", 2))
    assert done.wait(60) == 0
    runs = [[*short(tiny, pairs, tmp_path / str(rank), 4), *DDP, "resume=auto"] for rank in range(2)]
    ranks = start_ranks(start, [[one] for one in runs])
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    line = "process 1 starts after step 0, the first one after step 2: output_dir must be a folder that all machines"
    assert "".join(texts).count(line) == 1, texts


def test_a_process_whose_first_one_fails_before_they_meet_ends_in_a_line(start, tiny, pairs, tmp_path):
    """The second of two runs, for which they have formed their group."""
    runs = [[*short(tiny, pairs, tmp_path / str(number), 1), *DDP] for number in range(2)]
    ranks = start_ranks(start, [[runs[0], [*runs[1], "data.root=nowhere"]], runs])
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    assert texts[0].count("error: data.root=nowhere") == 1
    assert texts[1].count(f"error in process 1: {LOST}") == 1
    assert "Traceback" not in "".join(texts)
