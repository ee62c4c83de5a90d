"""Lightning callbacks of Retouch."""

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def find_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """Return the trainer's callback of this class, None without one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)
