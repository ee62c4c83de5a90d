"""What happens around the steps of a run."""

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def find_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """A run's callback of this class, where it has one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)
