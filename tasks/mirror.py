"""output_dir=s3://...: download a run's folder before the run; upload it after each checkpoint and at the end."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from datamodules.errors import UserError
from datamodules.files import DAMAGED, link_or_copy, replacing, sha256
from datamodules.shards.bucket import Bucket
from runs.run_folder import RunFolder
from runs.signals import Stopped, stop
from tasks.folders import MIRROR, one_at_a_time
from tasks.terminal import is_first_process, log, started_by_lightning

LOOK = 5.0  # seconds between two looks for a new checkpoint
TRIES = 30  # of the last upload; while the bucket is away each takes 15 s
WHEN_STOPPED = 100.0  # seconds for the last upload of a run that was told to stop, or has failed
ELSEWHERE = "another machine has saved a checkpoint there"
LAST = "checkpoints/last.ckpt"


@contextmanager
def mirrored(url: str, folder: Path, resumes: bool) -> Iterator[None]:
    """Download a run from `url`; upload it during the block, and wait for the last upload."""
    mirror = Mirror(url, RunFolder(folder))
    if not started_by_lightning():  # else the process that started this one has downloaded the run
        with one_at_a_time(folder):
            mirror.fetch(resumes)
    if not is_first_process():
        yield
        return
    mirror.thread.start()
    try:
        yield
    except BaseException as error:
        if lost := mirror.finish(WHEN_STOPPED):
            error.add_note(lost)
        raise
    if lost := mirror.finish():
        stop.check(f"during the last upload; {lost}")
        raise UserError(lost)
    log.info(f"uploaded to {mirror.bucket}")


class Mirror:
    """A run's folder and its copy in a bucket.

    The checksum of last.ckpt, which is transferred after all that belongs to it, identifies a state of the run. A note
    in the folder lists the states that it has seen in the bucket, each before its upload, and the transferred files.
    """

    def __init__(self, url: str, run: RunFolder) -> None:
        self.run, self.bucket, self.note = run, Bucket(url.rstrip("/"), "output_dir"), run.path / MIRROR
        self.seen: list[str] = []
        self.files: dict[str, list[int] | None] = {}  # size and time as transferred; None: perhaps transferred
        self.failure, self._ended = "", threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def fetch(self, resumes: bool) -> None:
        """Download the bucket's state, unless this folder has seen it; raise a UserError if it has one of its own."""
        there, state = self.bucket.names(deep=True), self._state()
        is_copy, last, exists = self.note.is_file(), self.run.checkpoint, self.run.checkpoint.is_file()
        is_taken = any(name.startswith(("lora/", "model/")) or name == self.run.finished.name for name in there)
        if (state is not None or is_taken) and not resumes:
            raise UserError(f"output_dir={self.bucket} already contains a run. Resume it with resume=auto.")
        with suppress(FileNotFoundError, *DAMAGED):  # read after the state, which is noted before its upload
            note = json.loads(self.note.read_text())
            self.seen, self.files = note["seen"], note["files"]
        if state is not None and not (exists and (state in self.seen or sha256(last) == state)):
            here = self.run.files()
            is_stale = is_copy and (not exists or self.files.get(LAST) == here[LAST])
            if here and not is_stale:
                raise UserError(
                    f"output_dir={self.bucket}: {self.run} has another run, or both have saved steps that the other "
                    f"lacks. Remove {self.run} to resume the bucket's run, or choose another output_dir."
                )
            log.warning(f"downloading {self.bucket}")  # in any process
            self._write()  # from now on this folder is a copy, which the next start completes
            for name in sorted(there, key=LAST.__eq__):
                self.bucket.download(name, self.run.path / name)
            self.files = {name: facts for name, facts in self.run.files().items() if name in there}
        if not is_copy or state not in (None, *self.seen):
            self.seen += [state] if state else []
            self._write()
        self.files = {name: facts for name, facts in self.files.items() if name in there}  # the others are lost there

    def finish(self, limit: float | None = None) -> str:
        """Wait for the last upload, at most `limit` seconds and until a signal; return what is wrong with it, or ""."""
        self._ended.set()
        with suppress(Stopped):
            self.thread.join(limit)
        why = self.failure or ("there was no time" if self.thread.is_alive() else "")
        hint = "" if why == ELSEWHERE else " The same command uploads it."
        return why and f"output_dir={self.bucket}: not all of {self.run} is there: {why}.{hint}"

    def _state(self) -> str | None:
        with suppress(FileNotFoundError):
            return self.bucket.checksum(LAST) or "of another program"
        return None

    def _write(self) -> None:
        with replacing(self.note) as temporary:
            temporary.write_text(json.dumps({"seen": self.seen, "files": self.files}))

    def _work(self) -> None:
        tries, tried = 0, None
        while tries < TRIES:
            ended, facts = self._ended.wait(LOOK), self.run.files().get(LAST)
            if not ended and facts in (None, tried, self.files.get(LAST)):
                continue
            tried = facts
            try:
                self.failure, done = self._upload(), ended
            except Exception as error:  # of the network's libraries, or of files: none of them may end the run
                self.failure, done = str(error) or type(error).__name__, False
            if self.failure:
                log.warning(f"note: not uploaded: {self.failure}. The next upload includes it.")
            if done:
                return
            tries += ended
            time.sleep(LOOK if ended else 0)

    def _upload(self) -> str:
        last, held = self.run.checkpoint, self.note.with_suffix(".ckpt")
        if LAST not in self.files and not last.is_file():
            return ""  # nothing is saved
        held.unlink(missing_ok=True)
        link_or_copy(last, held)  # the run may replace it; what belongs to it has been written before
        here = {**self.run.files(), LAST: [(status := held.stat()).st_size, status.st_mtime_ns]}
        changed = [name for name, facts in here.items() if self.files.get(name) != facts]
        gone = [name for name in self.files.keys() - here.keys() if not (self.run.path / name).exists()]
        if (changed or gone) and self._state() not in (None, *self.seen):
            return ELSEWHERE
        self.seen += [sha256(held)] if LAST in changed else []
        self.files.update(dict.fromkeys(changed))
        self._write()
        for name in sorted(changed, key=lambda name: (name == self.run.finished.name, name == LAST)):
            path = held if name == LAST else self.run.path / name
            with suppress(FileNotFoundError):  # removed meanwhile
                if path.suffix in (".ckpt", ".safetensors"):  # of the others, one may be appended to while it is read
                    self.bucket.write(name, path)
                else:
                    self.bucket.attempt(partial(self.bucket.put, name, path.read_bytes()), "written")
                self.files[name] = here[name]
        self.bucket.attempt(lambda: self.bucket.delete(gone), "written")
        self.files = {name: facts for name, facts in self.files.items() if name not in gone}
        self._write()
        held.unlink()
        return ""
