"""Seconds spent in the stages of a run, and progress lines."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class StageTimer:
    """Seconds by stage; nested stages are not counted twice.

    Attributes:
        running: names of the current stages, the innermost last.
        done: count of finished stages and of calls of `note_progress`.
        now: the present work in words, such as "sampling 2/4"; empty in training steps.
        listeners: called at each `note_progress`, with `now` and the detail.
        synchronize: a CUDA device to wait for at the beginning and end of a stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.running: list[str] = []
        self.done = 0
        self.now = ""
        self.listeners: list[Callable[[str], None]] = []
        self.synchronize: torch.device | None = None
        self._inner = 0.0
        self._aside = False  # whether NOT_TRAINING runs

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
        """Add the seconds spent inside, without those of nested stages, to `seconds[name]`."""
        self.running.append(name)
        try:
            with self._timed(name):
                yield
        finally:
            self.running.pop()
            self.note_progress(None if self.running else "")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if name == NOT_TRAINING and self._aside:  # nested in another one, which counts everything
            yield
            return
        start, outer, self._inner = self._now(), self._inner, 0.0
        self._aside, aside = self._aside or name == NOT_TRAINING, self._aside
        try:
            yield
        finally:
            self._aside = aside
        elapsed = self._now() - start
        inner = 0.0 if name == NOT_TRAINING else self._inner  # includes its nested stages
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner
        self._inner = outer + elapsed

    def _now(self) -> float:
        if self.synchronize is not None and self.synchronize.type == "cuda":
            torch.cuda.synchronize(self.synchronize)
        return time.perf_counter()
