"""output_dir=s3://...: a run's folder on this machine, and its copy in a bucket."""

import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from callbacks.peers import peers
from callbacks.run_folder import RunFolder
from callbacks.signals import Stopped
from datamodules.errors import UserError, printable
from datamodules.files import reason
from datamodules.shards.bucket import Bucket
from datamodules.shards.failures import failure
from tasks.folders import MIRROR, by_one_process
from tasks.run_download import RunDownload
from tasks.terminal import is_first_process, log, machine_count, started_by_lightning
from tasks.uploaded import Uploaded, facts_of, files_of, tag_of

# Seconds between two looks at what has changed.
LOOK = 5.0
# Seconds that a run which has ended waits for a bucket that fails; and for all of its last uploads where it was told to
# stop, and where other processes have failed, which end within ten.
PATIENCE, WHEN_STOPPED, WHEN_OTHERS_FAILED = 600.0, 100.0, 5.0
# Files that are replaced, never written to: they may be read twice.
REPLACED = (".ckpt", ".safetensors")


@contextmanager
def mirrored(url: str | None, folder: Path, resumes: bool) -> Iterator[None]:
    """Around a run: bring what the bucket has of it, upload what changes meanwhile, and all of it at the end.

    Args:
        url: of the run's copy; None for a run without one.
        resumes: whether an earlier run is to be resumed.

    Raises:
        UserError: the bucket holds a run that is not to be resumed; or the end was not uploaded.
    """
    if url is None:
        yield
        return
    mirror = Mirror(url, RunFolder(folder))
    try:
        if not started_by_lightning():  # else its machine's first one has done so
            by_one_process(folder / MIRROR / "fetching", lambda: mirror.fetch(resumes))
    except UserError:
        if is_first_process() and not mirror.uploaded.path.exists():
            shutil.rmtree(folder / MIRROR, ignore_errors=True)
        raise
    if not is_first_process():
        yield
        return
    mirror.start(at_once=machine_count() > 1)
    try:
        yield
    except BaseException as error:
        graceful = isinstance(error, Stopped) and not error.immediate
        if not graceful:
            peers.fail(error)  # the others do not wait for the last uploads
        limit = WHEN_OTHERS_FAILED if peers.connected and not graceful else math.inf
        try:
            mirror.finish(min(limit, WHEN_STOPPED) if isinstance(error, Stopped) else limit)
        except UserError as lost:
            error.add_note(str(lost))
        except Stopped as again:  # by a further signal
            error.add_note(again.__notes__[-1])
        raise
    mirror.finish()
    log.info(f"uploaded to {mirror}")


class Mirror:
    """A copy of a run's folder that can be resumed at any time: a checkpoint comes after all that belongs to it.

    Args:
        url: of the copy.
        run: what is copied.
    """

    def __init__(self, url: str, run: RunFolder) -> None:
        self.run = run
        self.bucket = Bucket(url.rstrip("/"), "output_dir")
        self.uploaded = Uploaded(run.path / MIRROR / "uploaded.json", str(self.bucket))
        self._failure: str | None = None
        self._moved = 0.0  # when something was uploaded
        self._left_out: set[str] = set()  # names that no object can have
        self._ended, self._given_up, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def __str__(self) -> str:
        return str(self.bucket)

    def fetch(self, resumes: bool) -> None:
        """Download the run where the bucket has more of it; as `RunDownload.fetch`."""
        RunDownload(self.run, self.bucket, self.uploaded).fetch(resumes)

    def start(self, at_once: bool = False) -> None:
        """Upload what changes, in a thread of its own.

        Args:
            at_once: what the bucket lacks first: other machines resume from it.
        """
        self.uploaded.read()
        if at_once:
            self._try()
        self._thread.start()

    def finish(self, limit: float = math.inf) -> None:
        """Upload what has changed since.

        Args:
            limit: seconds for that; a bucket that fails all the time has PATIENCE at most.

        Raises:
            UserError: not all is uploaded; also where a signal ends the waiting.
        """
        self._ended.set()
        start, left = time.monotonic(), f"{self.run} is not all in {self}"
        try:
            while not self._complete.wait(0.1):
                now = time.monotonic()
                failed = self._failure is not None and now - max(start, self._moved) > PATIENCE
                if not self._thread.is_alive() and not self._complete.is_set():
                    raise UserError(f"{left}: the copying has failed; the same command uploads it")
                if failed or now - start > limit:
                    why = self._failure or f"{now - start:.0f} s were not enough"
                    raise UserError(f"{left}: {why}; the same command uploads it")
        except Stopped as stopped:
            stopped.add_note(f"{left}; the same command uploads it")
            raise
        finally:
            self._given_up.set()

    def _work(self) -> None:
        while not self._ended.wait(LOOK):
            self._try()
        while self._try() is not None:
            if self._given_up.wait(min(LOOK, 1.0)):
                return
        self._complete.set()

    def _try(self) -> str | None:
        """Upload what has changed; the reason why not."""
        from obstore.exceptions import BaseError

        try:
            if not self._upload():
                return "it is still being written"
        except (BaseError, OSError, UserError) as error:
            what = self._reason(error)
            if self._failure is None:
                log.warning(f"note: {self}: {what}; the run goes on, and is uploaded when that is over")
            self._failure = what
            return what
        if self._failure is not None:
            log.info(f"{self} has all of the run again")
        self._failure = None
        return None

    def _reason(self, error: Exception) -> str:
        if isinstance(error, UserError):  # the note cannot be written
            return str(error)
        if isinstance(error, OSError) and error.filename is not None:
            return f"{error.filename}: {reason(error)}"
        return failure(error, self.bucket.url, known=True, done="written").what

    def _upload(self) -> bool:
        """Whether the bucket has all that there was when it was looked for."""
        last, uploaded = self.run.relative(self.run.checkpoint), self.uploaded
        checkpoint = facts_of(self.run.checkpoint)  # before what belongs to it
        # A run that is refused leaves no folder. One whose checkpoint is in the bucket, and that has none, is away.
        refused = last not in uploaded.files and not self.run.path.is_dir()
        here = {} if refused else files_of(self.run.path)
        changed, gone = uploaded.changed(here) - self._left_out, uploaded.files.keys() - here.keys()
        if not changed and not gone:
            return True
        uploaded.expect(changed)
        for name in sorted(changed, key=self._order):
            if self._given_up.is_set():
                return False
            path = self.run.path / name
            try:
                file = path.open("rb")  # this handle keeps what is replaced meanwhile
            except FileNotFoundError:  # removed meanwhile
                continue
            with file:
                if name == last and not checkpoint == here[name] == facts_of(path):
                    return False  # a newer one, whose weights may not be there yet
                self._put(name, here[name], file if path.suffix in REPLACED else file.read())
        if last not in gone:
            self._delete([name for name in gone if not (self.run.path / name).exists()])
        uploaded.write()
        return True

    def _put(self, name: str, facts: list[int], content: bytes | BinaryIO) -> None:
        try:
            self.uploaded.files[name] = [*facts, tag_of(self.bucket.put(name, content)["e_tag"])]
        except ValueError as error:
            log.warning(f"note: {self}: {printable(name)} is left out: {printable(reason(error))}")
            self._left_out.add(name)
            del self.uploaded.files[name]
        self._moved = time.monotonic()

    def _delete(self, names: list[str]) -> None:
        self.bucket.delete(names)
        for name in names:
            del self.uploaded.files[name]

    def _order(self, name: str) -> tuple[bool, bool, bool]:
        """Checkpoints behind what belongs to them; of these the last one; then that the run is finished."""
        path, last = self.run.path / name, self.run.checkpoint
        return path == self.run.finished, path == last, path.parent == last.parent
