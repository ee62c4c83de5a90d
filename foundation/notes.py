"""Notes: log lines that begin with `note: `. A run shows each once, whatever repeats it and in which process."""

import logging
import os
import sys

log = logging.getLogger("retouch")

NOTE = "note: "


class EachNoteOnce(logging.Filter):
    """Drops notes that this process has already logged, and by `is_shown` those that another has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.begin_run(True, "")

    def begin_run(self, speaks: bool, run: str) -> None:
        """Forget the notes of the run before.

        Args:
            speaks: whether this is the first process.
            run: distinguishes runs of the same processes.
        """
        self._speaks, self._run, self._pid = speaks, run, os.getpid()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self._logged
        if text.startswith(NOTE):
            self._logged.add(text)
        return is_new

    def is_shown(self, record: logging.LogRecord) -> bool:
        """Return whether this process shows a record on the terminal, which it shares with others.

        Until the processes are connected they do the same work, and the first one speaks for all. Then the one that is
        first to log a note shows it, since a caption or an image may be known to one process only.
        """
        text, torch = record.getMessage(), sys.modules.get("torch")
        if not text.startswith(NOTE):
            return True
        # A forked data worker must not use the connection.
        if torch is None or not torch.distributed.is_initialized() or os.getpid() != self._pid:
            return self._speaks
        from foundation.internals import default_store

        try:
            return default_store().add(f"{self._run}: {text}", 1) == 1
        except RuntimeError:  # the first process has ended
            return True


notes = EachNoteOnce()
log.addFilter(notes)


def note_once(text: str) -> None:
    """Log a note; in a run only the first of several that are equal."""
    log.warning(f"{NOTE}{text}")
