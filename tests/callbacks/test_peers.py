"""The processes of a run end together: nobody waits for one that has failed."""

import os
import signal
import time

import pytest
import torch

from tests.support.combinations import first
from tests.support.commands import short, wait_until
from tests.support.several_runs import DDP, start_ranks, start_two

LINES = {
    "mistake": "pair 7 is damaged: delete it",
    "memory": "out of GPU memory: lower data.batch_size",
    "disk": "No space left on device: /full",
    "error": "RuntimeError: nobody has thought of it",
    "kill": "process {} of this run is gone: it was killed",
}


@pytest.fixture
def failing(tiny, pairs, tmp_path):
    """Overrides of a run that saves each step and fails in its second."""

    def failing(**how):
        settings = ", ".join(f"{name}: {value}" for name, value in how.items())
        fail = f"+callbacks.fail={{_target_: tests.support.probes.Fail, {settings}}}"
        return [*short(tiny, pairs, tmp_path / "run", 6), *DDP, "save_every=1", fail]

    return failing


def assert_ended(processes, folder, rank, how):
    """All within 30 s of the failure, with one line on it, behind a whole checkpoint of the step before."""
    texts = [process.communicate(timeout=120)[0] for process in processes]
    seconds = time.time() - (folder / "failed").stat().st_mtime
    text = "".join(texts)
    print(f"all ended {seconds:.1f} s after {how} of process {rank}")
    assert seconds < 30, text
    assert all(process.returncode for process in processes), text
    line = LINES[how].format(rank)
    assert text.count(line) == 1, text
    assert text.count("Traceback") == text.count("Error executing job") == (how == "error"), text
    if how != "error":
        [said] = [text for text in texts if line in text]
        assert line in said.splitlines()[-1], text
        assert said.splitlines()[-1].startswith("error")
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "others"),
    first(
        1,
        [
            (1, "kill", "hang"),
            (1, "mistake", "step"),
            (0, "disk", "sleep"),
            (1, "memory", "hang"),
            (0, "kill", "step"),
        ],
    ),
)
def test_all_end_when_one_fails_whatever_the_others_wait_for(start, failing, tmp_path, rank, how, others):
    """In a step of gloo, in Python, or in a library that does not come back, as NCCL where a process is missing."""
    processes = start_two(start, [failing(rank=rank, how=how, others=others)])
    assert_ended(processes, tmp_path / "run", rank, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "kill"])
def test_the_command_that_started_the_others_ends_with_the_line_of_the_one_that_failed(start, failing, tmp_path, how):
    assert_ended([start("train", *failing(rank=1, how=how))], tmp_path / "run", 1, how)


@pytest.mark.slow
def test_a_run_ends_with_its_stacks_when_one_of_its_processes_hangs(start, tiny, pairs, tmp_path):
    """A stopped process: the other one waits for it, and notices."""
    hold = "+callbacks.hold={_target_: tests.support.hold.HoldOnce, step: 2, marker: " + str(tmp_path / "held") + "}"
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


@pytest.mark.slow
def test_a_process_whose_first_one_fails_before_they_meet_ends_in_a_line(start, tiny, pairs, tmp_path):
    """In the second of two runs, for which they have formed their group."""
    runs = [[*short(tiny, pairs, tmp_path / str(number), 1), *DDP] for number in range(2)]
    ranks = start_ranks(start, [[runs[0], [*runs[1], "data.root=nowhere"]], runs])
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    assert texts[0].count("error: data.root=nowhere") == 1
    assert texts[1].count("error in process 1: the first process of this run has ended: its own line says why") == 1
    assert "Traceback" not in "".join(texts)


@pytest.mark.slow
def test_processes_that_see_different_folders_are_told_so(start, tiny, pairs, tmp_path):
    """Else one would go on from a checkpoint, and the other begin."""
    done = start("train", *short(tiny, pairs, tmp_path / "0", 2))
    assert done.wait(60) == 0
    runs = [[*short(tiny, pairs, tmp_path / str(rank), 4), *DDP, "resume=auto"] for rank in range(2)]
    ranks = start_ranks(start, [[one] for one in runs])
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], texts
    line = "process 1 starts after step 0, the first one after step 2: output_dir must be a folder that all machines"
    assert "".join(texts).count(line) == 1, texts
