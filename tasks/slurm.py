"""A Slurm job that is signalled before its time is over is requeued, and resumes then."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from runs.signals import BEFORE_THE_END, Stopped
from tasks.terminal import is_first_process


@contextmanager
def queued_again(resume: str | None) -> Iterator[None]:
    """Requeue the job, in the first process, if one of the signals of `BEFORE_THE_END` stops the block.

    Lightning would requeue it with a checkpoint of its own; submitit with a pickle. Both leave signals alone that have
    a handler.

    Args:
        resume: auto; otherwise the restarted job would only be refused.
    """
    try:
        yield
    except Stopped as stopped:
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and stopped.signal in BEFORE_THE_END and is_first_process():
            stopped.add_note(_requeue(job) if resume else f"job {job} is not queued again: that takes resume=auto")
        raise


def _requeue(job: str) -> str:
    """Requeue the job and return the result in words."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    name = job if array is None else f"{array}_{task}"
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return f"there is no scontrol here: queue it again by scontrol requeue {name}"
    done = subprocess.run([scontrol, "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"scontrol requeue {name} failed: {done.stderr.strip() or f'status {done.returncode}'}"
    return f"job {name} is queued again"
