"""output_dir=s3://...: a run's folder on this machine, and its copy in a bucket."""

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from callbacks.peers import peers
from callbacks.run_folder import RunFolder
from callbacks.signals import Stopped
from datamodules.errors import UserError
from datamodules.files import sha256
from datamodules.shards.bucket import Bucket
from datamodules.shards.failures import failure
from tasks.folders import MIRROR, by_one_process
from tasks.resuming import checkpoint_step
from tasks.terminal import is_first_process, log
from tasks.uploaded import Uploaded, facts_of, tag_of

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
        by_one_process(folder / MIRROR / "fetching", lambda: mirror.fetch(resumes))
    except UserError:
        if is_first_process() and not mirror.uploaded.path.exists():
            shutil.rmtree(folder / MIRROR, ignore_errors=True)
        raise
    if not is_first_process():
        yield
        return
    mirror.start()
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
        self._ended, self._given_up, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def __str__(self) -> str:
        return str(self.bucket)

    def fetch(self, resumes: bool) -> None:
        """Download the run where the bucket has more of it than this folder; only one process may do this.

        Where it is broken off, it is completed by the next start: the last checkpoint comes at the end.

        Raises:
            UserError: the run is not to be resumed, or the folder holds another one.
        """
        is_copy = self.uploaded.read()
        there = {name: tag_of(one["e_tag"]) for name, one in self.bucket.names(deep=True).items()}
        self.uploaded.compare(there)
        last = str(self.run.checkpoint.relative_to(self.run.path))
        if last in there:
            if not resumes:
                raise UserError(
                    f"output_dir={self} already contains a run: resume it with resume=auto, or choose another"
                )
            if self.run.config.is_file() and not is_copy:
                raise UserError(
                    f"{self.run} and {self} both contain a run: remove the folder, or choose another output_dir"
                )
            self.uploaded.write()  # from now on this folder is the bucket's copy
            newest = self.uploaded.path.with_name("last.ckpt")
            try:
                if self._is_behind(last, newest):
                    self._download(there, last, newest)
            finally:
                newest.unlink(missing_ok=True)
        elif is_copy:
            self.uploaded.write()

    def _is_behind(self, last: str, newest: Path) -> bool:
        """Whether the bucket's last checkpoint, then in `newest` unless there is none here, is of a later step."""
        if self.run.checkpoints():
            checksum = self.bucket.checksum(last)
            if any(sha256(path) == checksum for path in self.run.checkpoints()):
                return False
            self.bucket.download(last, newest)
        here = max(map(_step, self.run.checkpoints()), default=-1)
        return here < 0 or here < _step(newest)

    def _download(self, there: dict[str, str | None], last: str, newest: Path) -> None:
        log.info(f"downloading {self}")
        for name in sorted(there, key=self._order):
            path = self.run.path / name
            if name == last and newest.is_file():
                os.replace(newest, path)
            elif not path.is_file() or self.uploaded.files.get(name) != [*facts_of(path), there[name]]:
                self.bucket.download(name, path)
            self.uploaded.files[name] = [*facts_of(path), there[name]]
            self.uploaded.write()

    def start(self) -> None:
        """Upload what changes, in a thread of its own."""
        self.uploaded.read()
        self._thread.start()

    def finish(self, limit: float = math.inf) -> None:
        """Upload what has changed since.

        Args:
            limit: seconds for that; a bucket that fails has PATIENCE at most.

        Raises:
            UserError: not all is uploaded; also where a signal ends the waiting.
        """
        self._ended.set()
        start, left = time.monotonic(), f"{self.run} is not all in {self}"
        try:
            while not self._complete.wait(0.1):
                spent = time.monotonic() - start
                failed = self._failure is not None and spent > PATIENCE
                broken = not self._thread.is_alive() and not self._complete.is_set()
                if failed or broken or spent > limit:
                    why = self._failure or f"{spent:.0f} s were not enough"
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
            self._upload()
        except (BaseError, OSError, UserError) as error:
            if isinstance(error, UserError):  # the note cannot be written
                reason = str(error)
            else:
                reason = failure(error, self.bucket.url, known=True, done="written").what
            if self._failure is None:
                log.warning(f"note: {self}: {reason}; the run goes on, and is uploaded when that is over")
            self._failure = reason
            return reason
        if self._failure is not None:
            log.info(f"{self} has all of the run again")
        self._failure = None
        return None

    def _upload(self) -> None:
        here, uploaded = self._files(), self.uploaded.files
        changed, gone = self.uploaded.changed(here), uploaded.keys() - here.keys()
        if not changed and not gone:
            return
        self.uploaded.expect(changed)
        for name in sorted(changed, key=self._order):
            path = self.run.path / name
            try:
                file = path.open("rb")  # this handle keeps what is replaced meanwhile
            except FileNotFoundError:  # removed meanwhile
                continue
            with file:
                if path == self.run.checkpoint and facts_of(path) != here[name]:
                    continue  # a newer one, whose weights may not be there yet
                put = self.bucket.put(name, file if path.suffix in REPLACED else file.read())
            uploaded[name] = [*here[name], tag_of(put["e_tag"])]
            if self._given_up.is_set():
                return
        self.bucket.delete(gone)
        for name in gone:
            del uploaded[name]
        self.uploaded.write()

    def _files(self) -> dict[str, list[int]]:
        """The files of the folder by name, with their sizes and times; not those that are being written."""
        found = {}
        for path in self.run.path.rglob("*"):
            name = path.relative_to(self.run.path)
            with contextlib.suppress(FileNotFoundError):  # it was there
                if path.is_file() and not any(part.startswith(".") for part in name.parts):
                    found[str(name)] = facts_of(path)
        return found

    def _order(self, name: str) -> tuple[bool, bool]:
        """Checkpoints last, and of them the newest."""
        path = self.run.path / name
        return path.parent == self.run.checkpoint.parent, path == self.run.checkpoint


def _step(checkpoint: Path) -> int:
    """Of one that can be read; -1 of others."""
    with contextlib.suppress(UserError):
        return checkpoint_step(checkpoint, "")
    return -1
