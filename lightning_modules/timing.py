"""Seconds spent in the stages of a run, and lines about what takes many of them."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

log = logging.getLogger("retouch")

# Between two lines about a step that takes long.
SECONDS_BETWEEN_LINES = 10
# The stage of what a run does beside its steps: sample pictures and savings. Speeds leave it out.
NOT_TRAINING = "not training"
# The stage of reading a component's weights, and of downloading them.
LOADING = "load"


class ProgressLines:
    """Lines about work that takes long: `3 of 9 captions  left 0:02:00`.

    Args:
        total: how many there are to do.
        what: is done, as the lines name it.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self.what = what
        self._start = self._last = time.monotonic()

    def done(self, number: int) -> None:
        """Say it, when the last line was some time ago; `number`: of those that are done."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            left = timedelta(seconds=round((now - self._start) / number * (self.total - number)))
            log.info(f"{number} of {self.total} {self.what}  left {left}")


class StageTimer:
    """Seconds by stage; a stage within another is not counted twice.

    Attributes:
        running: the names of the stages at hand, the innermost last.
        done: grows where something is done: with each stage that ends, and each `note_progress`.
        now: the work within a stage, in words, such as "sampling 2/4"; empty in training steps.
        listeners: called at each `note_progress`, with `now` and how far it is.
        synchronize: a CUDA device to wait for at the borders of a stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: list[str] = []
        self.done = 0
        self.now = ""
        self.listeners: list[Callable[[str], None]] = []
        self.synchronize: torch.device | None = None
        self._inner = 0.0
        self._aside = False  # whether a stage beside training runs

    def note_progress(self, now: str | None = None, detail: str = "") -> None:
        """Within a stage that takes long: count a part of it as done, and tell the listeners.

        Args:
            now: the work that begins, in words; None if it continues.
            detail: how far it is, appended to the words.
        """
        self.done += 1
        self.now = self.now if now is None else now
        for listener in self.listeners:
            listener(self.now + detail)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside, less those of stages within, to `seconds[name]`."""
        self.running.append(name)
        try:
            with self._timed(name):
                yield
        finally:
            self.running.pop()
            self.note_progress(None if self.running else "")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if name == NOT_TRAINING and self._aside:  # within another one, which counts all that it takes
            yield
            return
        start, outer, self._inner = self._now(), self._inner, 0.0
        self._aside, aside = self._aside or name == NOT_TRAINING, self._aside
        try:
            yield
        finally:
            self._aside = aside
        elapsed = self._now() - start
        inner = 0.0 if name == NOT_TRAINING else self._inner  # all that it takes counts, with its stages within
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner
        self._inner = outer + elapsed

    def _now(self) -> float:
        if self.synchronize is not None and self.synchronize.type == "cuda":
            torch.cuda.synchronize(self.synchronize)
        return time.perf_counter()
