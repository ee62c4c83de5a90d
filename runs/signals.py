"""Signals that end a command: SIGINT (Ctrl-C), SIGTERM, and those of Slurm before the time of a job is over."""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("retouch")

# Sent before the end by `sbatch --signal=USR1@180`, and USR2 by submitit: the job is requeued (`tasks.placement`).
BEFORE_THE_END = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *BEFORE_THE_END)
# Seconds in which a further signal counts as a duplicate: a launcher passes on what the terminal or the cluster has
# already sent to every process.
DEBOUNCE = 1.0
# Seconds in which the main thread must run the handler. Python runs it only between two of its own instructions, so
# never while the main thread waits inside a library.
HANDLER_TIMEOUT = 5.0


class Stopped(BaseException):
    """End of the command by a signal. It is no Exception, so that only the command itself catches it.

    Args:
        number: the signal.
        where: added to the message.
        immediate: whether the handler itself raised it, without finishing the current piece of work.
    """

    def __init__(self, number: signal.Signals, where: str = "", immediate: bool = False) -> None:
        super().__init__(f"stopped by {number.name} {where}".rstrip())
        self.signal = number
        self.immediate = immediate


class Stop:
    """Signal handling of one process.

    `busy_with` announces a piece of work that must be finished. The first signal during it is only recorded in
    `signal`; the work checks `signal`, or calls `check`, at its end. Any other signal raises `Stopped` in the main
    thread, and the next one after that ends the process.

    Attributes:
        signal: the first signal that arrived; None before.
        busy_with: name of the piece of work in the message, such as "this batch".
        on_signal: called first with each signal that is no duplicate.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, signal.Handlers | int | Callable[..., object] | None] = {}
        self._handled = 0  # number of calls of the handler
        self._reset()

    def _reset(self) -> None:
        self.signal: signal.Signals | None = None
        self.busy_with: str | None = None
        self.on_signal: Callable[[int], None] = lambda number: None
        self._last_time = 0.0
        self._raised = False
        self._pid = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Temporarily handle the signals, and then restore the previous handlers."""
        self._reset()
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self.install_handlers()
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader, self._handled), daemon=True).start()
        try:
            yield
        finally:
            previous, self._previous = self._previous, {}
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(writer)

    def install_handlers(self) -> None:
        """Install the handlers, again if a library has installed its own; only inside `listening`."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def check(self, where: str = "") -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal is not None:
            raise Stopped(self.signal, where)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker: the main process decides
            return
        self._handled += 1
        now = time.monotonic()
        first = self.signal is None
        if not first and now - self._last_time < DEBOUNCE:
            return
        self._last_time = now
        self.signal = self.signal or signal.Signals(number)
        self.on_signal(number)
        if first and self.busy_with is not None:
            with contextlib.suppress(RuntimeError):  # the signal arrived while another line was being written
                log.info(f"{self.signal.name}: stopping after {self.busy_with} (once more: at once)")
        elif self._raised:  # the work that Stopped interrupted does not end
            os._exit(128 + number)
        else:
            self._raised = True
            raise Stopped(self.signal, immediate=True)

    def _watch(self, reader: int, handled: int) -> None:
        """End the process if the main thread cannot run the handler; runs in a thread of its own.

        A process that is busy with a piece of work is not ended: it may be in a long computation.

        Args:
            reader: a pipe that receives a byte for each signal at once (`signal.set_wakeup_fd`).
            handled: number of calls of the handler before.
        """
        while select.select([reader], [], []) and (numbers := os.read(reader, 4096)):
            if arrived := self._previous.keys() & set(numbers):
                time.sleep(HANDLER_TIMEOUT)
                stuck = self._previous and self._handled == handled
                if stuck and self.busy_with is None:
                    number = signal.Signals(max(arrived))
                    os.write(2, f"stopped by {number.name}\n".encode())
                    os._exit(128 + number)
            handled = self._handled
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)  # the bytes of signals that have been handled since
        os.close(reader)


# A forked data worker must not write into the main process's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

# One per process, like the signals.
stop = Stop()
