"""output_dir=s3://...: a run's folder on this machine, and its copy in a bucket."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from callbacks.run_folder import RunFolder
from callbacks.signals import Stopped
from datamodules.errors import UserError
from datamodules.files import reading, replacing
from datamodules.shards.bucket import Bucket
from datamodules.shards.failures import failure
from tasks.terminal import is_first_process, log

if TYPE_CHECKING:
    from obstore import PutResult

Made = TypeVar("Made")
# Seconds between two looks at what has changed.
LOOK = 5.0
# Seconds for the last uploads of a run that has ended, and of one that was told to stop.
PATIENCE, PATIENCE_WHEN_STOPPED = 600.0, 100.0
# What of the folder is in the bucket: by name its size, its time, and what the bucket calls this version.
KNOWN = ".mirror.json"
# What an object in the bucket says of its content beside it.
CHECKSUM = "sha256"
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
    mirror.fetch(resumes)
    if not is_first_process():
        yield
        return
    mirror.start()
    try:
        yield
    except BaseException as error:
        try:
            mirror.finish(PATIENCE_WHEN_STOPPED if isinstance(error, Stopped) else PATIENCE)
        except UserError as lost:
            error.add_note(str(lost))
        raise
    mirror.finish(PATIENCE)
    log.info(f"uploaded to {mirror}")


class Mirror:
    """A copy of a run's folder that can be resumed at any time: a checkpoint comes after all that belongs to it.

    Args:
        url: of the copy.
        run: what is copied.
    """

    def __init__(self, url: str, run: RunFolder) -> None:
        self.run = run
        self.bucket = Bucket(url, "output_dir")
        self._note = run.path / KNOWN
        self._known: dict[str, list[int | str | None]] = {}
        if self._note.is_file():
            with reading(self._note, "delete it"):
                self._known = json.loads(self._note.read_text())
        self._away = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def __str__(self) -> str:
        return str(self.bucket)

    def fetch(self, resumes: bool) -> None:
        """Download the run, unless it was this folder that the bucket has it from."""
        there = self._listed()
        checkpoint = str(self.run.checkpoint.relative_to(self.run.path))
        if checkpoint not in there:
            return
        if not resumes:
            raise UserError(f"output_dir={self} already contains a run: resume it with resume=auto, or choose another")
        if self._known.get(checkpoint, [None])[-1] == there[checkpoint]:
            return
        if self.run.config.is_file() and not self._known:
            raise UserError(
                f"{self.run} and {self} both contain a run: remove the folder, or choose another output_dir"
            )
        log.info(f"downloading {self}")
        for name in sorted(there, key=self._order):
            tag = self.bucket.download(name, self.run.path / name)
            self._known[name] = [*self._facts(self.run.path / name), tag]
        self._write_note()

    def start(self) -> None:
        """Upload what changes, in a thread of its own."""
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Upload what has changed since; raises UserError where that does not succeed in time."""
        self._ended.set()
        self._thread.join()
        end = time.monotonic() + seconds
        while (reason := self._try()) is not None:
            if time.monotonic() > end:
                raise UserError(f"{self.run} is not all in {self}: {reason}; the same command uploads it")
            time.sleep(min(LOOK, 1.0))

    def _work(self) -> None:
        while not self._ended.wait(LOOK):
            self._try()

    def _try(self) -> str | None:
        """Upload what has changed; the reason why not."""
        from obstore.exceptions import BaseError

        try:
            self._upload()
        except (BaseError, OSError) as error:
            reason = failure(error, self.bucket.url, known=True).what
            if not self._away:
                log.warning(f"note: {self}: {reason}; the run goes on, and is uploaded when that is over")
            self._away = True
            return reason
        if self._away:
            log.info(f"{self} has all of the run again")
        self._away = False
        return None

    def _upload(self) -> None:
        import obstore

        here = self._files()
        changed = [name for name, facts in here.items() if self._known.get(name, [])[:2] != facts]
        for name in sorted(changed, key=self._order):
            path = self.run.path / name
            try:
                if path == self.run.checkpoint and self._facts(path) != here[name]:
                    continue  # a newer one, whose weights may not be there yet
                put = self._put(name, path)
            except FileNotFoundError:  # replaced meanwhile
                continue
            self._known[name] = [*here[name], put["e_tag"]]
        for name in self._known.keys() - here.keys():
            obstore.delete(self.bucket.store, self.bucket.prefix + name)
            del self._known[name]
        if changed:
            self._write_note()

    def _put(self, name: str, path: Path) -> "PutResult":
        with path.open("rb") as file:  # this handle keeps what is replaced meanwhile
            return self.bucket.put(name, file if path.suffix in REPLACED else file.read())

    def _files(self) -> dict[str, list[int | str | None]]:
        """The files of the folder by name, with their sizes and times; not those that are being written."""
        paths = [path for path in self.run.path.rglob("*") if path.is_file()]
        names = {path: path.relative_to(self.run.path) for path in paths}
        return {
            str(name): self._facts(path)
            for path, name in names.items()
            if not any(part.startswith(".") for part in name.parts)
        }

    @staticmethod
    def _facts(path: Path) -> list[int | str | None]:
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]

    def _order(self, name: str) -> tuple[bool, bool]:
        """Checkpoints last, and of them the newest."""
        path = self.run.path / name
        return path.parent == self.run.checkpoint.parent, path == self.run.checkpoint

    def _listed(self) -> dict[str, str | None]:
        """The names in the bucket, and what it calls their versions."""
        return {name: one["e_tag"] for name, one in self.bucket.names(deep=True).items()}

    def _write_note(self) -> None:
        if self.run.path.is_dir():
            with replacing(self._note) as temporary:
                temporary.write_text(json.dumps(self._known))
