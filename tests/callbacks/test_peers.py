"""The processes of a run end together: nobody waits for one that has failed."""

import time

import pytest
import torch

from tests.support.combinations import first
from tests.support.commands import short
from tests.support.several_runs import DDP, start_two

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
