"""What the terminal shows: Retouch's own lines, a person's mistakes in one line, and nothing from the libraries."""

import ctypes
import errno
import io
import logging
import multiprocessing
import os
import signal
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from datamodules.errors import UserError
from runs.signals import Stopped

log = logging.getLogger("retouch")

COMPILERS = ("torch._dynamo", "torch._inductor")
# What a person can do something about: no room, no permission, no folder there.
DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
}
# By task: the settings that it reads which save memory.
OUT_OF_MEMORY = {
    "fit": "lower data.batch_size (and raise trainer.accumulate_grad_batches) or data.resolution, set "
    "model.gradient_checkpointing=full or model.offload.blocks=N, or choose model/quantization=fp8 or fp4",
    "edit": "lower batch_size or max_area, set model.offload.encoders=true or model.offload.blocks=N, or choose "
    "model/quantization=fp8 or fp4",
    "cache": "set model.devices.text_encoder=cpu, or lower data.resolution",
    "compare_precision": "set model.devices.text_encoder=cpu, or lower data.resolution",
    "caption": "lower captioner.batch_size or captioner.max_area, or choose captioner/quantization=nf4",
    "": "close other programs on the GPU, or compute on the CPU by trainer.accelerator=cpu",
}
# Seconds in which a process that has failed prints its error: those that only notice its end wait for that.
SECONDS_TO_SAY_WHY = 3.0
LOST_PEER = (
    "another process of this run has ended. Its own line says why; if it has none, it was killed, as by a system that "
    "is out of memory, or its machine is gone. Start again; a run resumes from its last checkpoint by ckpt_path=last."
)
# Of prctl(2): the signal that a process gets when its parent ends.
PARENT_DEATH_SIGNAL = 1
# The variables by which Lightning, torchrun and SLURM tell a process its rank.
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Known from the environment, before Lightning knows of several processes."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def launched_from_outside() -> bool:
    """Whether torchrun or srun started this process: a process that Lightning starts has no RANK."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def started_by_lightning() -> bool:
    """Whether the first process of this machine started this one, in the middle of its work."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and not launched_from_outside()


def machine_count() -> int:
    """On how many machines torchrun or srun has started processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", 1))


@contextmanager
def command_line(trains: bool = False) -> Iterator[None]:
    """Around a whole command: set up logging, survive a closed or broken output pipe, answer mistakes in one line.

    Args:
        trains: whether processes that Lightning has started are of no use without the first one, and end with it.
    """
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)
    configure_logging()
    if sys.platform == "linux":
        # A killed torchrun leaves its processes running, next to those that are started in their place. Lightning stops
        # the first process when another fails, and not the reverse; in NCCL the others react to nothing but SIGKILL.
        alone = signal.SIGKILL if trains and started_by_lightning() else 0
        number = signal.SIGTERM if "TORCHELASTIC_RUN_ID" in os.environ else alone
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        raise SystemExit(130) from None


class _TolerantPipe(io.FileIO):
    """A pipe whose reader may leave, as in `| head`: what is written then is dropped, and the command continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return super().write(data)


def _tolerant(stream: TextIO | None) -> TextIO:
    """The stream; a `_TolerantPipe` where it is a pipe, and /dev/null where the process was started with it closed."""
    if stream is None:
        return open(os.devnull, "w")
    own = any(stream is one for one in (sys.__stdout__, sys.__stderr__))
    if not own or not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return stream
    buffer = io.BufferedWriter(_TolerantPipe(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream is sys.__stderr__)


def configure_logging() -> None:
    """Retouch's lines go to stderr as they are."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # These libraries log while they are imported.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in ("bitsandbytes", "torch.utils._pytree", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    log.handlers = [_StderrHandler()]
    log.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    log.propagate = False


class _StderrHandler(logging.Handler):
    """Writes to the present sys.stderr: a progress bar replaces it, to keep lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def silence_libraries() -> None:
    """Show only the errors of libraries, and none of their progress bars."""
    import diffusers.utils.logging
    import lightning.pytorch
    import transformers.utils.logging

    # Importing lightning sets its level: this must come after.
    for name in (lightning.pytorch.__name__, "lightning.fabric", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Names the process that has failed, before it kills the others.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    for name in ("lightning", "peft", "bitsandbytes", "torch.distributed.fsdp", "huggingface_hub"):
        warnings.filterwarnings("ignore", module=name)
    # adapter=full under autocast: norms whose weights are float32.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


def end_workers() -> None:
    """Kill data workers that an error left behind: they ignore SIGTERM, by which Python would end them."""
    for child in multiprocessing.active_children():
        child.kill()


@contextmanager
def one_line_errors(in_sweep: bool = False, task: str = "") -> Iterator[None]:
    """Turn a person's mistake into one line and exit status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    A signal becomes a line too, and status 128 and its number. What was noted on the way (`add_note`) is in the line.

    In a sweep it becomes an exception that Hydra keeps until the other jobs are done, and then prints in a line.
    It carries neither cause nor traceback: these would keep the failed job's model in memory.
    """
    try:
        yield
        return
    except Stopped as stopped:
        if not stopped.immediate and not is_first_process() and not launched_from_outside():
            raise SystemExit(0) from None  # all stop alike: Lightning takes another status for a failure
        if is_first_process():
            print(_with_notes(str(stopped), stopped), file=sys.stderr)
        raise SystemExit(128 + stopped.signal) from None
    except Exception as error:
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            in_sweep = False  # the processes cannot continue together
        line = _one_line(error, task)
        if line == LOST_PEER:
            time.sleep(SECONDS_TO_SAY_WHY)
        if line is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        line = _with_notes(line, error)
    rank = next((os.environ[name] for name in RANKS if os.environ.get(name, "0") != "0"), None)
    where = "" if rank is None else f" in process {rank}"
    print(f"error{where}: {line}", file=sys.stderr)
    if in_sweep:
        from hydra.errors import CompactHydraException

        raise CompactHydraException(line)
    raise SystemExit(1)


def _with_notes(line: str, error: BaseException) -> str:
    return "; ".join([line, *getattr(error, "__notes__", [])])


def _one_line(error: BaseException, task: str = "") -> str | None:
    """What to tell the person; None where it is no mistake of theirs but of ours."""
    from hydra.errors import InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    where = ""
    while isinstance(error, InstantiationException):
        where = where or str(error).rpartition("full_key: ")[2]
        if error.__cause__ is None:
            return str(error).splitlines()[0]
        error = error.__cause__
    # A data worker's error arrives with the worker's traceback before it.
    line = str(error).strip().splitlines()[-1].removeprefix("datamodules.errors.UserError: ") if str(error) else ""
    if isinstance(error, UserError):
        return line
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'settings'}: {str(error).splitlines()[0]}"
    # Imported here: it takes seconds, and mistakes in the settings are reported before.
    import torch
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from runs.shares import is_lost_peer

    if is_lost_peer(error):
        return LOST_PEER
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {OUT_OF_MEMORY.get(task, OUT_OF_MEMORY[''])}"
    if type(error).__module__.startswith(COMPILERS):
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        return f"model.compile=true does not run here: {lines[0] if lines else type(error).__name__}; leave it out"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.strerror}: {error.filename or 'while writing'}"
    if isinstance(error, MisconfigurationException):
        return line
    return f"{where}: {line}" if where else None
