"""SIGINT (Ctrl-C) and SIGTERM end every command alike."""

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

# Seconds within which a signal is the same one again: launchers pass on what a terminal or a cluster sends to all.
ECHO = 1.0
# Seconds after which a main thread that has not come to handle a signal never will: it sits in a library, waiting.
PATIENCE = 5.0


class Stopped(BaseException):
    """A signal ended the command. Not an Exception: only the command may catch it.

    Args:
        at_once: with something in hand, or before it was.
    """

    def __init__(self, number: signal.Signals, where: str = "", at_once: bool = False) -> None:
        super().__init__(f"stopped by {number.name} {where}".rstrip())
        self.signal = number
        self.at_once = at_once


class Stop:
    """Whether the process was told to stop.

    Between two pieces of work the first signal raises `Stopped` at once. While one is `in_hand`, it is only noted, and
    whoever does the work looks at `signal`, or calls `check`, at its end. A second signal raises in any case.

    Attributes:
        signal: the first, or None.
        in_hand: what is finished first, such as "this step".
        on_signal: called with each signal that counts, before anything else.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, signal.Handlers | int | Callable[..., object] | None] = {}
        self._runs = 0  # of the handler, ever
        self._reset()

    def _reset(self) -> None:
        self.signal: signal.Signals | None = None
        self.in_hand: str | None = None
        self.on_signal: Callable[[int], None] = lambda number: None
        self._told = 0.0
        self._raised = False
        self._pid = os.getpid()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around a whole command."""
        self._reset()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.take_over()
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader, self._runs), daemon=True).start()
        try:
            yield
        finally:
            handlers, self._handlers = self._handlers, {}
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(writer)

    def take_over(self) -> None:
        """Handle the signals again after a library has put its own handlers; nothing happens outside `listening`."""
        for number in self._handlers:
            signal.signal(number, self._handle)

    def check(self, where: str = "") -> None:
        """Raise `Stopped` if a signal has come."""
        if self.signal is not None:
            raise Stopped(self.signal, where)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data worker: its trainer decides
            return
        self._runs += 1
        now = time.monotonic()
        first = self.signal is None
        if not first and now - self._told < ECHO:
            return
        self._told = now
        self.signal = self.signal or signal.Signals(number)
        self.on_signal(number)
        if first and self.in_hand is not None:
            with contextlib.suppress(RuntimeError):  # in the middle of another line
                log.info(f"{self.signal.name}: stopping after {self.in_hand} (once more: at once)")
        elif self._raised:  # and what it ended takes its time
            os._exit(128 + number)
        else:
            self._raised = True
            raise Stopped(self.signal, at_once=True)

    def _watch(self, reader: int, runs: int) -> None:
        """End the process where a signal is not handled, and nothing in hand: it may sit in a library for ever.

        Python handles signals between two of its own instructions only.

        Args:
            reader: gives a byte for each signal as it comes.
            runs: of the handler, before any of these.
        """
        while select.select([reader], [], []) and (numbers := os.read(reader, 4096)):
            if told := self._handlers.keys() & set(numbers):
                time.sleep(PATIENCE)
                if self._handlers and self._runs == runs and self.in_hand is None:
                    number = signal.Signals(max(told))
                    os.write(2, f"stopped by {number.name}\n".encode())
                    os._exit(128 + number)
            runs = self._runs
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)  # of signals that these runs were for
        os.close(reader)


# Data workers have signals of their own.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

# Of the process, as the signals are.
stop = Stop()
