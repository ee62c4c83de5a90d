"""What the terminal shows: Retouch's own lines, a person's mistakes in one line, and nothing from the libraries."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from datamodules.errors import UserError

log = logging.getLogger("retouch")


def configure_logging() -> None:
    """Retouch's lines go to stderr as they are."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it speaks while it is imported
    log.handlers = [_StderrHandler()]
    log.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.WARNING)
    log.propagate = False


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is now: a progress bar puts itself there, to keep lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def silence_libraries() -> None:
    """Let libraries speak from errors upwards, and no loading bar flash for each small file."""
    import diffusers.utils.logging
    import lightning.pytorch
    import transformers.utils.logging

    # Importing lightning sets its level: this must come after.
    for name in (lightning.pytorch.__name__, "lightning.fabric", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("lightning", "peft"):
        warnings.filterwarnings("ignore", module=name)
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


@contextmanager
def one_line_errors(in_sweep: bool = False) -> Iterator[None]:
    """Turn a person's mistake into one line and exit status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    In a sweep it becomes an exception that Hydra keeps until the other jobs are done, and then prints in a line.
    It carries neither cause nor traceback: these would keep the failed job's model in memory.
    """
    import torch
    from hydra.errors import CompactHydraException, InstantiationException
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
        return
    except (UserError, MisconfigurationException, InstantiationException, torch.OutOfMemoryError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        line = _one_line(error)
    rank = os.environ.get("LOCAL_RANK", "0")
    print(f"error: {line}" if rank == "0" else f"error in process {rank}: {line}", file=sys.stderr)
    if in_sweep:
        raise CompactHydraException(line)
    raise SystemExit(1)


def _one_line(error: BaseException) -> str:
    import torch
    from hydra.errors import InstantiationException

    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "out of GPU memory: lower data.batch_size (and raise trainer.accumulate_grad_batches), set "
            "model.gradient_checkpointing=true or model.devices.text_encoder=cpu, or use smaller pictures"
        )
    # A data worker's error arrives with the worker's traceback before it.
    return str(error).strip().splitlines()[-1].removeprefix("datamodules.errors.UserError: ")
