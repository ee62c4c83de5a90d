"""Pictures and pages may fail without failing the run that they show."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from datamodules.files import reason

log = logging.getLogger("retouch")


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Turn any error inside into a note that `what` is missing; HYDRA_FULL_ERROR=1 adds the traceback."""
    try:
        yield
    except Exception as error:
        line = reason(error)
        log.warning(f"note: no {what}: {line}", exc_info=os.environ.get("HYDRA_FULL_ERROR") == "1")
