"""Work that several processes divide among themselves, on any machines that see one place; any may end at any time.

Each unit of work has a file of its own, `NAME.GENERATION.lease`, which can be made only once: who makes it has the
unit. A process that works here rewrites `PROCESS.alive` every few seconds. Once that file is gone, or has not changed
for `STALE` seconds by the reader's own clock, its units are free, and who makes the lease of the next generation takes
one over. A finished unit has a `NAME.done`. So no file system has to lock files, and no two clocks have to agree.

Each piece of work is a round, a folder with a number. Its files are removed only after it was closed, and nobody begins
the next one while somebody is at work in it. Nor does anybody join one in which all have ended: what they have left is
looked at anew in the next, since what is to be done may have changed.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from datamodules.errors import UserError
from datamodules.shards.places import Place
from datamodules.shards.processes import Seen, identity, new_name, now

# Seconds between two signs of life, and after which a process without one is taken for dead.
BEAT, STALE = 5.0, 60.0
CLOSED = "closed"


class Leases:
    """The units of one piece of work after the other.

    Args:
        root: holds nothing else.

    Attributes:
        here: the files of the present round.
        me: the name of this process.
    """

    def __init__(self, root: Place) -> None:
        self.root = root
        self.me = new_name()
        self._seen = Seen()
        self._beaten = 0.0
        self._silent = 0.0  # the longest time without a sign of life of this process
        self._ended = threading.Event()
        self._enter(max(self._rounds(), default=0))

    def _enter(self, number: int) -> None:
        self._number = number
        self.here = self.root.inner(f"{number:06d}")
        self._holders: dict[str, str] = {}  # by lease, which never changes

    def _rounds(self) -> list[int]:
        return [int(name) for name in self.root.folders() if name.isdigit()]

    @contextmanager
    def working(self, wait: Callable[[], None]) -> Iterator[None]:
        """Take part in the present round, or in a new one after a closed one; give signs of life meanwhile.

        What this process has taken and not finished is free afterwards.

        Args:
            wait: called while somebody is at work in a closed round.
        """
        while True:
            self._enter_open_round(wait)
            self.me = new_name()  # what was taken before and not finished is not held any more
            self._beaten, self._silent = now(), 0.0
            self._beat(0)
            # Who closes a round looks for signs of life afterwards: one of the two sees the other.
            if max(self._rounds(), default=0) == self._number and self.here.read(CLOSED) is None:
                break
            self.here.remove([f"{self.me}.alive"])
        self._ended.clear()
        thread = threading.Thread(target=self._keep_beating, daemon=True, name="leases")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            with suppress(UserError):  # a bucket that is away: it will be found silent
                self.here.remove([f"{self.me}.alive"])

    def _enter_open_round(self, wait: Callable[[], None]) -> None:
        while True:
            self._enter(max(self._rounds(), default=0))
            files, others = list(self.here.names()), self.others()
            if CLOSED in files and not others:
                return self._enter(self._number + 1)
            if not files or (CLOSED not in files and self._seen.certain.intersection(others)):
                return
            if others:
                wait()
            else:
                self.close()

    def close(self) -> None:
        """End the round, unless somebody is at work in it."""
        if self.others():
            return
        self.here.create(CLOSED, b"")
        if not self.others():
            self.here.remove(name for name in self.here.names() if name != CLOSED)
            for number in self._rounds():
                if number < self._number:
                    self.root.drop(f"{number:06d}")

    def take(self, names: Iterable[str], most: int) -> dict[str, bool]:
        """Take up to `most` of these units that nobody works on and that are not done.

        Returns:
            The units taken; for each, whether an earlier holder may still write to its files: it has only been silent.
        """
        files = list(self.here.names())
        done, generations = _done(files), _generations(files)
        taken: dict[str, bool] = {}
        alive: dict[str, bool | None] = {}
        for name in names:
            if len(taken) == most:
                break
            if name in done:
                continue
            generation = generations.get(name, -1)
            holder = None if generation < 0 else self._holder(f"{name}.{generation}.lease")
            if holder is not None:
                if holder not in alive:
                    alive[holder] = self._is_alive(holder)
                if alive[holder]:
                    continue
            mine = self.here.create(f"{name}.{generation + 1}.lease", self._signed())
            # The holder may have finished it and left since the files were listed.
            if mine and self.here.read(f"{name}.done") is None:
                taken[name] = holder is not None and alive[holder] is None
        return taken

    def finish(self, name: str) -> None:
        """Note that a unit is done; raises a UserError where it may be another's by now."""
        self.require_mine()
        self.here.create(f"{name}.done", self._signed())

    def open(self, names: Iterable[str]) -> list[str]:
        """Those of the units that are not done."""
        done = _done(self.here.names())
        return [name for name in names if name not in done]

    def once(self, name: str, work: Callable[[], Any], wait: Callable[[], None]) -> None:
        """Let one process do this, and return when it is done; `wait` is called between two looks."""
        while self.open([name]):
            if self.take([name], 1):
                work()
                self.finish(name)
                return
            wait()

    def write(self, name: str, content: Any) -> None:
        """Leave a note for the others, which replaces an earlier one."""
        self.here.write(name, json.dumps(content).encode())

    def notes(self, start: str) -> list[Any]:
        """All notes whose names start so."""
        found = (self.read(name) for name in self.here.names() if name.startswith(start))
        return [note for note in found if note is not None]

    def read(self, name: str) -> Any:
        """A note; None if there is none."""
        with suppress(ValueError):
            return json.loads(self.here.read(name) or b"null")

    def is_in_use(self) -> bool:
        """Whether somebody is at work here for certain; of another machine's process that is seen by its next sign."""
        while others := self.others():
            if self._seen.certain.intersection(others):
                return True
            time.sleep(self.root.look)
        return False

    def others(self) -> list[str]:
        """The processes that are at work here, or may be, without this one."""
        names = [name.removesuffix(".alive") for name in self.here.names() if name.endswith(".alive")]
        return [name for name in names if name != self.me and self._is_alive(name)]

    def require_mine(self) -> None:
        """Raise a UserError where this process was ever silent so long that others may have taken over its units."""
        silent = max(now() - self._beaten, self._silent)  # in this order: a sign may be given between the two
        if silent > STALE / 2:
            raise UserError(
                f"this process gave no sign of life in {self.here} for {silent:.0f} s, so others may do its work: "
                "start again"
            )

    def _signed(self) -> bytes:
        return json.dumps({"holder": self.me}).encode()

    def _holder(self, lease: str) -> str:
        if lease not in self._holders:
            note = self.read(lease)
            holder = note.get("holder") if isinstance(note, dict) else None
            # One that is being written, or damaged, is as good as held: by a process that nobody knows yet.
            if not isinstance(holder, str):
                return lease.removesuffix(".lease")
            self._holders[lease] = holder
        return self._holders[lease]

    def _is_alive(self, process: str) -> bool | None:
        """Whether a process is at work; None if it is silent, and False if it has certainly ended."""
        if process == self.me:
            return True
        sign = self.here.read(f"{process}.alive") or b""
        if not sign and "." not in process:
            return False
        return self._seen.is_alive(process, sign, STALE)

    def _keep_beating(self) -> None:
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            with suppress(UserError):  # a disk that is away: `require_mine` says so in time
                self._beat(number)

    def _beat(self, number: int) -> None:
        self.write(f"{self.me}.alive", {"beat": number, **identity(os.getpid())})
        beaten = now()
        self._silent, self._beaten = max(self._silent, beaten - self._beaten), beaten


def _done(files: Iterable[str]) -> set[str]:
    return {name.removesuffix(".done") for name in files if name.endswith(".done")}


def _generations(files: Iterable[str]) -> dict[str, int]:
    """Of each unit that was ever taken the last generation of its lease."""
    newest: dict[str, int] = {}
    for file in files:
        if file.endswith(".lease"):
            name, _, generation = file.removesuffix(".lease").rpartition(".")
            newest[name] = max(int(generation), newest.get(name, -1))
    return newest


def unit_name(unit: int) -> str:
    """What a numbered unit is called."""
    return f"{unit:05d}"
