"""What of a run's folder is in a bucket, noted beside the run: what was uploaded once is not uploaded again."""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from datamodules.errors import UserError
from datamodules.files import DAMAGED, replacing

# Of a file that was uploaded: its size and time here, and what the bucket calls this version.
UNKNOWN = [None, None, None]


class Uploaded:
    """The files that are in the bucket, or may be, since the answer to their upload was lost.

    Args:
        path: of the note.
        url: of the bucket's folder.

    Attributes:
        downloading: whether a download has begun that was not completed.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        self.files: dict[str, list[Any]] = {}
        self.downloading = False

    def read(self) -> bool:
        """Whether there is a note: then the run's folder is a copy of the bucket's.

        Raises:
            UserError: of another one's.
        """
        if not self.path.is_file():
            return False
        try:
            note = json.loads(self.path.read_text())
            url, self.files, self.downloading = note["url"], dict(note["files"]), note["downloading"]
        except DAMAGED:  # then all is uploaded again
            return True
        if url != self.url:
            run = self.path.parent.parent
            raise UserError(f"{run} is the copy of {url}, not of {self.url}: remove the folder, or choose another")
        return True

    def write(self) -> None:
        """Write the note, unless the run's folder is gone."""
        if self.path.parent.parent.is_dir():
            with replacing(self.path) as temporary:
                note = {"url": self.url, "downloading": self.downloading, "files": self.files}
                temporary.write_text(json.dumps(note))

    def compare(self, there: Mapping[str, str | None]) -> None:
        """Forget what the bucket has lost, and the facts of what it has otherwise: both are uploaded again.

        Args:
            there: the names in the bucket, with what it calls their versions.
        """
        known = {name: facts for name, facts in self.files.items() if name in there}
        self.files = {name: facts if facts[-1] == there[name] else UNKNOWN for name, facts in known.items()}

    def changed(self, here: Mapping[str, list[int]]) -> set[str]:
        """The names of those files that are not uploaded as they are here."""
        return {name for name, facts in here.items() if self.files.get(name, UNKNOWN)[:2] != facts}

    def expect(self, names: Iterable[str]) -> None:
        """Note, before they are uploaded, that these may be in the bucket."""
        self.files.update(dict.fromkeys(names, UNKNOWN))
        self.write()


def files_of(folder: Path) -> dict[str, list[int]]:
    """The files below a folder by name, with their facts; not those that are being written.

    Raises:
        OSError: it is not there, or a folder in it cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(folder):
            raise error  # else one that has just been replaced

    found = {}
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if (facts := facts_of(path)) is not None:
                found[str(path.relative_to(folder))] = facts
    return found


def facts_of(path: Path) -> list[int] | None:
    """A file's size and time, which tell whether it has changed; None where there is none."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    return [status.st_size, status.st_mtime_ns] if S_ISREG(status.st_mode) else None


def tag_of(tag: str | None) -> str | None:
    """What a store calls a version of an object, without the quotes that Azure's listings leave out."""
    return tag if tag is None else tag.strip('"')
