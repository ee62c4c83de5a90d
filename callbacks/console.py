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
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.WARNING)
    log.propagate = False


def silence_libraries() -> None:
    """Let libraries speak from errors upwards, and no loading bar flash for each small file."""
    import diffusers.utils.logging
    import lightning.pytorch
    import transformers.utils.logging

    # Importing lightning sets its level: this must come after.
    for name in (lightning.pytorch.__name__, "lightning.fabric", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


@contextmanager
def one_line_errors(in_sweep: bool = False) -> Iterator[None]:
    """Turn a person's mistake into one line and exit status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    In a sweep it becomes an exception that Hydra keeps until the other jobs are done, and then prints in a line.
    """
    from hydra.errors import CompactHydraException, InstantiationException
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (UserError, MisconfigurationException, InstantiationException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        cause = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__  # type: ignore[assignment]
        # A data worker's error arrives with the worker's traceback before it.
        line = str(cause).strip().splitlines()[-1].removeprefix("datamodules.errors.UserError: ")
        print(f"error: {line}", file=sys.stderr)
        if in_sweep:
            raise CompactHydraException(line) from error
        raise SystemExit(1) from error
