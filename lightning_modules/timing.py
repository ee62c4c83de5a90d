"""Seconds spent in the stages of a run, and progress lines."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch

log = logging.getLogger("retouch")

# From one progress line to the next.
SECONDS_BETWEEN_LINES = 10
# The stage of sample images, validation and saving, which speeds leave out.
NOT_TRAINING = "not training"
# The stage of reading or downloading a component's weights.
LOADING = "load"


class ProgressLines:
    """Progress lines of long work: `3 of 9 captions  left 0:02:00`.

    Args:
        total: number of items.
        what: name of the items.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self.what = what
        self._start = self._last = time.monotonic()

    def done(self, number: int) -> None:
        """Log the number of finished items, if the last line was some time ago."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            left = timedelta(seconds=round((now - self._start) / number * (self.total - number)))
            log.info(f"{number} of {self.total} {self.what}  left {left}")


@dataclass(eq=False)
class StageTimer:
    """Seconds by stage; nested stages are not counted twice.

    Attributes:
        running: names of the current stages, the innermost last.
        done: count of finished stages and of calls of `note_progress`.
        now: the present work in words, such as "sampling 2/4"; empty in training steps.
        listeners: called at each `note_progress`, with `now` and the detail.
        synchronize: a CUDA device to wait for at the beginning and end of a stage.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    done: int = 0
    now: str = ""
    listeners: list[Callable[[str], None]] = field(default_factory=list)
    synchronize: torch.device | None = None
    _inner: float = 0.0  # of stages nested in the current one

    def note_progress(self, now: str | None = None, detail: str = "") -> None:
        """Count a part of a long stage as done, and call the listeners.

        Args:
            now: the work that begins, in words; None if it continues.
            detail: progress, appended to the words.
        """
        self.done += 1
        self.now = self.now if now is None else now
        for listener in self.listeners:
            listener(self.now + detail)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `seconds[name]`, without nested stages; NOT_TRAINING includes them."""
        counted = name != NOT_TRAINING or name not in self.running
        self.running.append(name)
        start, outer, self._inner = self._now(), self._inner, 0.0
        try:
            yield
        finally:
            elapsed = self._now() - start
            self.running.pop()
            if counted:
                own = elapsed if name == NOT_TRAINING else elapsed - self._inner
                self.seconds[name] = self.seconds.get(name, 0.0) + own
            self._inner = outer + (elapsed if counted else self._inner)
            self.note_progress(None if self.running else "")

    def _now(self) -> float:
        if self.synchronize is not None and self.synchronize.type == "cuda":
            torch.cuda.synchronize(self.synchronize)
        return time.perf_counter()
