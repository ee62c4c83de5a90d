"""A run that is resumed where there is less of it than in its bucket, or nothing."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from callbacks.run_folder import RunFolder
from datamodules.errors import UserError
from datamodules.files import sha256
from datamodules.shards.bucket import Bucket
from tasks.resuming import checkpoint_step
from tasks.terminal import log
from tasks.uploaded import UNKNOWN, Uploaded, facts_of, tag_of

# How often a bucket whose files change is listed again.
ATTEMPTS = 5


class RunDownload:
    """Brings a run's folder to what its bucket has.

    Args:
        run: the folder.
        bucket: its copy.
        uploaded: what is known to be the same in both.
    """

    def __init__(self, run: RunFolder, bucket: Bucket, uploaded: Uploaded) -> None:
        self.run = run
        self.bucket = bucket
        self.uploaded = uploaded
        self.last = run.relative(run.checkpoint)

    def fetch(self, resumes: bool) -> None:
        """Download the run where the bucket has more of it than this folder; only one process may do this.

        Where it is broken off, it is completed by the next start: the last checkpoint comes at the end.

        Raises:
            UserError: the run is not to be resumed, or the folder holds another one.
        """
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):  # another machine has just replaced some
                return self._fetch(resumes)
        raise UserError(f"{self.bucket} lists files that are not there: start again")

    def _fetch(self, resumes: bool) -> None:
        is_copy = self.uploaded.read()
        there = {name: tag_of(one["e_tag"]) for name, one in self.bucket.names(deep=True).items()}
        self.uploaded.compare(there)
        if self.last in there:
            self._check(resumes, is_copy)
            newest = self.uploaded.path.with_name("last.ckpt")
            newest.unlink(missing_ok=True)
            try:
                # Most starts find the checkpoint as it was noted, and read none.
                if not self._has(self.last, there[self.last]) and self._is_behind(newest):
                    self._download(there, newest)
                self.uploaded.downloading = False
            finally:
                newest.unlink(missing_ok=True)
        if is_copy or self.last in there:
            self.uploaded.write()

    def _check(self, resumes: bool, is_copy: bool) -> None:
        if not resumes:
            here = f"output_dir={self.bucket} already contains a run"
            raise UserError(f"{here}: resume it with resume=auto, or choose another")
        if self.run.config.is_file() and not is_copy:
            both = f"{self.run} and {self.bucket} both contain a run"
            raise UserError(f"{both}: remove the folder, or choose another output_dir")

    def _is_behind(self, newest: Path) -> bool:
        """Whether the bucket's last checkpoint, then in `newest` unless there is none here, is of a later step."""
        mine = self.run.checkpoints()
        if self.uploaded.downloading:  # others may be a part of what is to be completed
            mine = [path for path in mine if path == self.run.checkpoint]
        if mine:
            checksum = self.bucket.checksum(self.last)
            if any(sha256(path) == checksum for path in mine):
                return False
            self.bucket.download(self.last, newest)
        here = max(map(_step, mine), default=-1)
        return here < 0 or here < _step(newest)

    def _download(self, there: Mapping[str, str | None], newest: Path) -> None:
        log.warning(f"downloading {self.bucket}")  # whichever process does it
        self.uploaded.downloading = True
        self.uploaded.write()  # from now on this folder is the bucket's copy, and not yet all of it
        for name in sorted(there, key=lambda name: name == self.last):  # so it says that all is here
            path = self.run.path / name
            if name == self.last and newest.is_file():
                os.replace(newest, path)
            elif not self._has(name, there[name]):
                self.bucket.download(name, path)
            self.uploaded.files[name] = [*(facts_of(path) or UNKNOWN[:2]), there[name]]
            self.uploaded.write()

    def _has(self, name: str, tag: str | None) -> bool:
        facts = facts_of(self.run.path / name)
        return facts is not None and self.uploaded.files.get(name) == [*facts, tag]


def _step(checkpoint: Path) -> int:
    """Of one that can be read; -1 of others."""
    with contextlib.suppress(UserError):
        return checkpoint_step(checkpoint, "")
    return -1
