"""Signals that end a command: SIGINT (Ctrl-C), SIGTERM, Windows' SIGBREAK, and Slurm's before a job's time is over."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

log = logging.getLogger("retouch")

# Before the end, `sbatch --signal=USR1@180` and submitit (USR2) send them, and the job is requeued; Windows has none.
BEFORE_THE_END = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
# SIGBREAK is the only one that Windows sends to another process: by Ctrl-Break, by the page, and to close a window.
INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGBREAK") if hasattr(signal, name))
SIGNALS = (*INTERRUPTS, signal.SIGTERM, *BEFORE_THE_END)
# The number by which another process is interrupted; there it must be the first of a group of its own.
INTERRUPT = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
# Seconds in which a further signal counts as a duplicate: a launcher passes on what the terminal or the cluster has
# already sent to every process.
DEBOUNCE = 1.0


class Stopped(BaseException):
    """End of the command by a signal. It is not an Exception: only the command itself catches it.

    Args:
        where: added to the message.
        immediate: whether the handler itself raised it, without finishing the current piece of work.
        file: that requested it in place of a signal; empty otherwise.
    """

    def __init__(self, number: signal.Signals, where: str = "", immediate: bool = False, file: str = "") -> None:
        super().__init__(f"stopped by {file or number.name} {where}".rstrip())
        self.signal = number
        self.immediate = immediate
        self.file = file


class Stop:
    """Signal handling of one process.

    `busy_with` announces a piece of work that must be finished. The first signal during it is only recorded in
    `signal`; the work checks `signal`, or calls `check`, at its end. Any other signal raises `Stopped` in the main
    thread, and the next one after that ends the process.

    Attributes:
        signal: the first signal that arrived; None before.
        busy_with: name of the piece of work in the message, such as "this batch".
        on_signal: called first with each signal, without duplicates.
        file: the run's request to stop, which then counts as SIGINT; empty before.
        requests: members of `REQUESTS` that the callbacks fulfil at the end of the current training step.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, signal.Handlers | int | Callable[..., object] | None] = {}
        self._reset()

    def _reset(self) -> None:
        self.signal: signal.Signals | None = None
        self.busy_with: str | None = None
        self.on_signal: Callable[[int], None] = lambda number: None
        self.file = ""
        self.requests: set[str] = set()
        self._last_time = 0.0
        self._raised = False
        self._pid = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Temporarily handle the signals, and then restore the previous handlers."""
        self._reset()
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self.install_handlers()
        try:
            yield
        finally:
            previous, self._previous = self._previous, {}
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._reset()

    def install_handlers(self) -> None:
        """Install the handlers, again if a library has installed its own; only inside `listening`."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def check(self, where: str = "") -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal is not None:
            raise Stopped(self.signal, where, file=self.file)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker: the main process decides
            return
        now = time.monotonic()
        first = not self._last_time
        if not first and now - self._last_time < DEBOUNCE:
            return
        self._last_time = now
        self.signal = self.signal or signal.Signals(number)
        self.on_signal(number)
        if first and self.busy_with is not None:
            with suppress(RuntimeError):  # the signal arrived while another line was being written
                log.info(f"{signal.Signals(number).name}: stopping after {self.busy_with} (once more: at once)")
        elif self._raised:  # the work that Stopped interrupted does not end
            os._exit(128 + number)
        else:
            self._raised = True
            raise Stopped(self.signal, immediate=True)


# One per process, like the signals.
stop = Stop()
