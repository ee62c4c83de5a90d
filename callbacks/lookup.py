"""How one callback finds another of the same run."""

from typing import Any, TypeVar

Kind = TypeVar("Kind")


def find_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """The trainer's callback of this class; None where it has none."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)
