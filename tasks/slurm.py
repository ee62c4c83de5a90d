"""A Slurm job that is told to end before its time is over is queued again, and resumes then."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from runs.signals import BEFORE_THE_END, Stopped
from tasks.terminal import is_first_process


@contextmanager
def queued_again(resume: str | None) -> Iterator[None]:
    """Around what a signal may stop: by one of `BEFORE_THE_END` the first process has Slurm queue the job again.

    Lightning does so by a checkpoint of its own; submitit by a pickle that it would write over. Both leave signals
    alone that have a handler, and ours does not know them.

    Args:
        resume: auto, or the job would only be refused when it starts again.
    """
    try:
        yield
    except Stopped as stopped:
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and stopped.signal in BEFORE_THE_END and is_first_process():
            stopped.add_note(_requeue(job) if resume else f"job {job} is not queued again: that takes resume=auto")
        raise


def _requeue(job: str) -> str:
    """What came of it."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    name = job if array is None else f"{array}_{task}"
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return f"there is no scontrol here: queue it again by scontrol requeue {name}"
    done = subprocess.run([scontrol, "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"scontrol requeue {name} failed: {done.stderr.strip() or f'status {done.returncode}'}"
    return f"job {name} is queued again"
