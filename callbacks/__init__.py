"""What happens around the steps of a run."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Kind = TypeVar("Kind")

log = logging.getLogger("retouch")


def find_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """A run's callback of this class, where it has one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)


@contextmanager
def never_costing_the_run(what: str) -> Iterator[None]:
    """Around what only shows a run: whatever fails inside becomes a note (HYDRA_FULL_ERROR=1 adds the traceback).

    Args:
        what: is missing then.
    """
    try:
        yield
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning(f"note: no {what}: {line}", exc_info=os.environ.get("HYDRA_FULL_ERROR") == "1")
