"""Files that are there whole or not at all, and what is in them."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from datamodules.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what was written there takes `path`'s place at the end.

    When writing fails, an older file at `path` stays as it was and the temporary one is removed.

    Raises:
        UserError: the file could not be written (disk full, no permission).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        kept = "; the file that was there before is untouched" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror or error}{kept}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path, keep: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which takes its place at the end; when writing fails, it is removed.

    Args:
        keep: leave what another process has put there meanwhile.

    Raises:
        UserError: the folder could not be written (disk full, no permission).
    """
    temporary, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.is_dir():
            if keep:
                return
            folder.rename(old)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def sha256(path: Path) -> str:
    """The checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A file's path, size, two times in ns, and the sha256 of its bytes.
Hashed = tuple[str, int, int, int, str]


def hash_file(path: Path) -> Hashed:
    """Read the file for its checksum, and note by what a change would show."""
    return (*_signature(path), sha256(path))


def _signature(path: Path) -> tuple[str, int, int, int]:
    stat = path.stat()
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class FileHashes:
    """Checksums of files that need no reading again while their size and times stay.

    Args:
        paths: files of one JSON list a line, as `line` gives it; later lines go before earlier ones.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known: dict[str, Hashed] = {}
        for path in paths:
            for line in path.read_text(encoding="utf-8").split("\n"):
                # A line that a process was writing when it died is no JSON; its file is read again.
                with contextlib.suppress(ValueError):
                    name, size, modified, changed, checksum = json.loads(line)
                    self._known[name] = (name, size, modified, changed, checksum)

    def get(self, path: Path) -> str | None:
        """The checksum, if the file is as it was."""
        try:
            signature = _signature(path)
        except FileNotFoundError:
            return None
        hashed = self._known.get(signature[0])
        return hashed[4] if hashed is not None and hashed[:4] == signature else None

    @staticmethod
    def line(hashed: Hashed) -> str:
        return json.dumps(hashed) + "\n"

    def lines(self) -> str:
        """All that is known, each file once."""
        return "".join(map(self.line, self._known.values()))
