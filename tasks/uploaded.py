"""What of a run's folder is in a bucket, noted beside the run: what was uploaded once is not uploaded again."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.files import reading, replacing

# Of a file that was uploaded: its size and time here, and what the bucket calls this version.
UNKNOWN = [None, None, None]


class Uploaded:
    """The files that are in the bucket, or may be, since the answer to their upload was lost.

    Args:
        path: of the note.
        url: of the bucket's folder.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        self.files: dict[str, list[Any]] = {}

    def read(self) -> bool:
        """Whether there is a note: then the run's folder is a copy of the bucket's.

        Raises:
            UserError: of another one's; or the note is damaged.
        """
        if not self.path.is_file():
            return False
        run = self.path.parent.parent
        with reading(self.path, f"remove {run}, and the run is downloaded again"):
            note = json.loads(self.path.read_text())
            url, self.files = note["url"], dict(note["files"])
        if url != self.url:
            raise UserError(f"{run} is the copy of {url}, not of {self.url}: remove the folder, or choose another")
        return True

    def write(self) -> None:
        """Write the note, unless the run's folder is gone."""
        if self.path.parent.parent.is_dir():
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps({"url": self.url, "files": self.files}))

    def compare(self, there: Mapping[str, str | None]) -> None:
        """Forget what the bucket has lost, or has got from another machine: it is uploaded again.

        Args:
            there: the names in the bucket, with what it calls their versions.
        """
        self.files = {name: facts for name, facts in self.files.items() if there.get(name) == facts[-1]}

    def changed(self, here: Mapping[str, list[int]]) -> list[str]:
        """The names of those files that are not uploaded as they are here."""
        return [name for name, facts in here.items() if self.files.get(name, UNKNOWN)[:2] != facts]

    def expect(self, names: Iterable[str]) -> None:
        """Note, before they are uploaded, that these may be in the bucket."""
        self.files.update(dict.fromkeys(names, UNKNOWN))
        self.write()


def facts_of(path: Path) -> list[int]:
    """A file's size and time, which tell whether it has changed."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def tag_of(tag: str | None) -> str | None:
    """What a store calls a version of an object, without the quotes that Azure's listings leave out."""
    return tag if tag is None else tag.strip('"')
