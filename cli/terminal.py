"""The terminal: Retouch's log lines, mistakes of users in one line, and nothing from libraries."""

import ctypes
import errno
import io
import logging
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any, TextIO

from hydra.errors import CompactHydraException

from foundation.errors import UserError, printable
from foundation.locks import open_own
from foundation.notes import notes
from runs.run_folder import RunFolder
from runs.signals import Stopped

log = logging.getLogger("retouch")

# No space, no permission, no such folder: a user can do something about these.
DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES),
    *(errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
}
OUT_OF_MEMORY = (
    "out of GPU memory: use smaller batches (data.batch_size with more trainer.accumulate_grad_batches, batch_size, "
    "captioner.batch_size) or images (data.resolution, max_area, captioner.max_area), or save memory by "
    "model/quantization=fp8 or nf4, model.gradient_checkpointing=full, model.offload.blocks=N, "
    "model.offload.encoders=true or model.devices.text_encoder=cpu"
)
# Seconds in which a failed process prints its error before the others, which only notice its end, print theirs.
SECONDS_TO_SAY_WHY = 3.0
LOST_PEER = (
    "another process of this run has ended. Its own line says why; if it has none, it was killed, as by a system that "
    "is out of memory, or its machine is gone. Start again; a run resumes from its last checkpoint by ckpt_path=last."
)
LOST_WORKER = re.compile(r"DataLoader worker \(.+(exited unexpectedly|killed by signal)")
# Where semaphores and the batches of data workers are.
SHARED_MEMORY = Path("/dev/shm")
# prctl(2): the signal that a process receives when its parent ends.
PARENT_DEATH_SIGNAL = 1
# Variables by which Lightning, torchrun and Slurm pass a process its rank.
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Return whether the environment gives this process rank 0; Lightning need not have started the others yet."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def srun_tasks() -> int:
    """Return the number of processes that srun has started; 1 for a command without srun, also in an allocation."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1")
    return int(tasks) if "SLURM_STEP_ID" in os.environ else 1


def launched_from_outside() -> bool:
    """Return whether torchrun or srun started this process and others; Lightning sets no RANK."""
    return "RANK" in os.environ or srun_tasks() > 1


def started_by_lightning() -> bool:
    """Return whether the first process of this machine started this one, in the middle of its work."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and not launched_from_outside()


def machine_count() -> int:
    """Return the number of machines on which torchrun or srun has started processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", 1))


@contextmanager
def command_line(trains: bool = False) -> Iterator[None]:
    """Temporarily set up logging, survive a closed or broken output pipe, and answer mistakes in one line.

    If it `trains`, processes that Lightning has started end with the first one.
    """
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)
    configure_logging()
    if srun_tasks() == 1:
        os.environ["SLURM_JOB_NAME"] = "interactive"  # else Lightning expects the processes of the allocation
    if sys.platform == "linux":
        # A killed torchrun leaves its processes running next to those of the next start. Lightning stops the first
        # process if another fails, but not the reverse; NCCL reacts to nothing but SIGKILL.
        ends_with_parent = signal.SIGKILL if trains and started_by_lightning() else 0
        number = signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else ends_with_parent
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {printable(str(line_for_users(error)))}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        raise SystemExit(130) from None


class _TolerantPipe(io.FileIO):
    """A pipe whose reader may leave, as in `| head`: later output is dropped, and the command continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # a BrokenPipeError; on Windows it has no class of its own
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return super().write(data)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return the stream, a `_TolerantPipe` in place of a pipe, or /dev/null in place of a closed stream."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    is_original = any(stream is one for one in (sys.__stdout__, sys.__stderr__))
    if not is_original or not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return stream
    buffer = io.BufferedWriter(_TolerantPipe(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream is sys.__stderr__)


def configure_logging(run: str = "") -> None:
    """Write Retouch's log to stderr without decoration; a `run` begins, and shows its own notes."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # These libraries log while they are imported.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in ("bitsandbytes", "torch.utils._pytree", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # the present one: a progress bar replaces it to keep lines above itself
    log.handlers = [_LineHandler(lambda text: sys.stderr.write(text))]
    log.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    log.propagate = False
    log.handlers[0].addFilter(notes.is_shown)
    notes.begin_run(is_first_process(), run)


class _LineHandler(logging.Handler):
    """Output by a function; control characters, which names may contain and terminals obey, are escaped."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))

    def put(self, text: str) -> None:
        with suppress(OSError):  # a full disk ends no run
            self.write(printable(text, "\n\t") + "\n")


@contextmanager
def kept_log(run: RunFolder) -> Iterator[None]:
    """Temporarily append log and error to the run's log.txt, if stderr does not; a run without settings has none."""
    fresh, goes_there = not run.log.exists(), False
    with open_own(run.log) as file:
        with suppress(OSError):  # a stream without a file
            goes_there = os.path.sameopenfile(sys.stderr.fileno(), file.fileno())
        if goes_there:  # the page has started this command
            yield
            return
        log.addHandler(handler := _LineHandler(lambda text: file.write(text.encode())))
        try:
            yield
        except (Exception, Stopped) as error:
            line, kind = line_for_users(error), "" if isinstance(error, Stopped) else "error: "
            handler.put(traceback.format_exc().rstrip() if line is None else kind + _with_notes(line, error))
            raise
        finally:
            log.removeHandler(handler)
            if fresh and not run.config.exists():
                run.log.unlink()


def silence_libraries() -> None:
    """Hide the progress bars of libraries and their messages below errors."""
    import diffusers.utils.logging
    import lightning.pytorch
    import transformers.utils.logging

    # Importing lightning sets its level: this must come after.
    for name in (lightning.pytorch.__name__, "lightning.fabric", "huggingface_hub", "torch._higher_order_ops.wrap"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Names the failed process before it kills the others.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    for name in ("lightning", "peft", "bitsandbytes", "torch.distributed.fsdp", "torch._inductor", "huggingface_hub"):
        warnings.filterwarnings("ignore", module=name)
    # adapter=full under autocast: norms with float32 weights.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


def end_workers() -> None:
    """Kill data workers that an error left behind; they ignore Python's SIGTERM."""
    for child in multiprocessing.active_children():
        child.kill()


class FailedJob(CompactHydraException):
    """Failure of a sweep's job, whose line has been printed in this process; elsewhere it is unpickled as its base."""

    def __reduce__(self) -> tuple[type[Exception], tuple[Any, ...]]:
        return CompactHydraException, self.args


@contextmanager
def one_line_errors(in_sweep: bool = False) -> Iterator[None]:
    """Temporarily turn users' mistakes into one line and status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    A signal becomes a line and status 128 + its number. The line includes notes on the exception (`add_note`).
    In a sweep, an error or a requested stop becomes a `FailedJob`, which ends the command after the other jobs. It
    carries neither cause nor traceback, which would keep the model of the failed job in memory.
    """
    try:
        yield
        return
    except Stopped as stopped:
        if not stopped.immediate and not is_first_process() and not launched_from_outside():
            raise SystemExit(0) from None  # all stop together, and Lightning regards another status as a failure
        line: str | None = _with_notes(str(stopped), stopped)
        if is_first_process():
            print(line, file=sys.stderr)
        if stopped.immediate or not (in_sweep and stopped.file) or sys.modules["torch"].distributed.is_initialized():
            raise SystemExit(128 + stopped.signal) from None
    except Exception as error:
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            in_sweep = False  # the processes cannot continue together
        line = line_for_users(error)
        if line == LOST_PEER:
            time.sleep(SECONDS_TO_SAY_WHY)
        if line is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        line = _with_notes(line, error)
        rank = next((os.environ[name] for name in RANKS if os.environ.get(name, "0") != "0"), None)
        where = "" if rank is None else f" in process {rank}"
        print(f"error{where}: {printable(line)}", file=sys.stderr)
    if in_sweep:
        raise FailedJob(line)
    raise SystemExit(1)


def _with_notes(line: str, error: BaseException) -> str:
    return "; ".join([line, *getattr(error, "__notes__", [])])


def line_for_users(error: BaseException) -> str | None:
    """Return the message for the user, or None if the error is not theirs but ours."""
    from hydra.errors import InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    where = ""
    while isinstance(error, InstantiationException):
        where = where or str(error).rpartition("full_key: ")[2]
        if error.__cause__ is None:
            return str(error).splitlines()[0]
        error = error.__cause__
    # The error of a data worker is preceded by its traceback.
    line = str(error).strip().splitlines()[-1].removeprefix("foundation.errors.UserError: ") if str(error) else ""
    if isinstance(error, UserError | Stopped):
        return line
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'settings'}: {str(error).splitlines()[0]}"
    # Imported here: it takes seconds, and mistakes in the settings are reported before.
    import torch
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_modules.execution.compilation import why_not_compiled
    from runs.shares import is_lost_peer

    if is_lost_peer(error):
        return LOST_PEER
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if (cause := why_not_compiled(error)) is not None:
        return f"torch.compile failed: {cause}. Set model.compile=false."
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if LOST_WORKER.match(line) or (is_full and SHARED_MEMORY.is_dir() and not disk_usage(SHARED_MEMORY).free >> 20):
        return (
            f"a data worker has ended, because {SHARED_MEMORY} or the memory is full. Set data.num_workers=0, or give "
            "more: docker run --shm-size=8g."
        )
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.strerror}: {error.filename or 'while writing'}"
    if isinstance(error, MisconfigurationException):
        return line
    if isinstance(error, TypeError) and (named := re.search(r"unexpected keyword argument '(\w+)'$", line)) and where:
        return f"{where}.{named[1]}: there is no such setting. Leave it out."
    return f"{where}: {line}" if where else None
