"""How SIGINT (Ctrl-C), SIGTERM and what Slurm sends before a job's time is over end every command."""

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

# Sent before the end by `sbatch --signal=USR1@180`, and USR2 by submitit: the job is queued again (`tasks.slurm`).
BEFORE_THE_END = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *BEFORE_THE_END)
# Seconds within which a further signal counts as the same one: a launcher passes on what the terminal or the cluster
# has already sent to every process.
DEBOUNCE = 1.0
# Seconds that the main thread has to run the handler. Python runs it between two of its own instructions only, so a
# main thread that waits inside a library may never do so.
HANDLER_TIMEOUT = 5.0


class Stopped(BaseException):
    """A signal ended the command. It is not an Exception, so that only the command itself catches it.

    Args:
        number: the signal.
        where: what the message adds to its name.
        immediate: raised by the handler itself, without finishing the current piece of work.
    """

    def __init__(self, number: signal.Signals, where: str = "", immediate: bool = False) -> None:
        super().__init__(f"stopped by {number.name} {where}".rstrip())
        self.signal = number
        self.immediate = immediate


class Stop:
    """Handles the signals of one process.

    A piece of work that must be finished is announced by `busy_with`. The first signal during it is only noted in
    `signal`; whoever does the work looks at `signal`, or calls `check`, when the piece is done. Any other signal raises
    `Stopped` in the main thread, and the next one after that ends the process.

    Attributes:
        signal: the first signal that came; None before.
        busy_with: the piece of work to finish first, as the message names it: "this batch".
        on_signal: called with each signal that is not a duplicate, before anything else.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, signal.Handlers | int | Callable[..., object] | None] = {}
        self._handled = 0  # how often the handler has run
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
        """Handle the signals during a whole command; afterwards the previous handlers are back."""
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
        """Handle the signals (again, after a library has installed its own handlers); only inside `listening`."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def check(self, where: str = "") -> None:
        """Raise `Stopped` if a signal has come."""
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
            with contextlib.suppress(RuntimeError):  # the signal came while another line was being written
                log.info(f"{self.signal.name}: stopping after {self.busy_with} (once more: at once)")
        elif self._raised:  # Stopped is on its way, but what it interrupted does not end
            os._exit(128 + number)
        else:
            self._raised = True
            raise Stopped(self.signal, immediate=True)

    def _watch(self, reader: int, handled: int) -> None:
        """A thread of its own: end the process where the main thread does not get to run the handler.

        A process that is busy with a piece of work is left alone: it may be in a long computation.

        Args:
            reader: a pipe that gets a byte for each signal at the moment it comes (`signal.set_wakeup_fd`).
            handled: how often the handler had run before.
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
                os.read(reader, 4096)  # the bytes of signals that have been handled meanwhile
        os.close(reader)


# A forked data worker must not write into the main process's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

# Signals belong to the process, and so does this.
stop = Stop()
