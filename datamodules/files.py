"""Files that are there whole or not at all, and what is in them."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from safetensors import SafetensorError
from yaml import YAMLError

from datamodules.errors import UserError

# What parsers raise for bytes that are not what they should be; RuntimeError is PyTorch's.
DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, RuntimeError, MemoryError)
# safetensors has one of its own for a disk that is full.
WRITE_ERRORS = (OSError, SafetensorError)


@contextmanager
def reading(path: str | Path, remedy: str) -> Iterator[None]:
    """Around what reads a file that may be damaged, missing or unreadable.

    Args:
        path: named in the message.
        remedy: what to do about it, in the imperative.

    Raises:
        UserError: one line with the file, what is wrong with it, and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}; {remedy}") from error
    except (*DAMAGED, SafetensorError, zipfile.BadZipFile, pickle.UnpicklingError, YAMLError) as error:
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, of a GPU
            raise
        raise UserError(f"{path} is damaged ({reason(error)}); {remedy}") from error


def reason(error: BaseException) -> str:
    """What the system or a library says, in one line."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def short_name(name: str, most: int) -> str:
    """A name of at most `most` bytes: of a long one the beginning, told from others by a checksum."""
    raw = os.fsencode(name)
    if len(raw) <= most:
        return name
    return f"{raw[: most - 17].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:16]}"


def _beside(path: Path, end: str) -> Path:
    """A hidden name of this process; file systems take 255 bytes."""
    return path.with_name(f".{short_name(path.name, 200)}.{os.getpid()}.{end}")


def require_file(path: Path) -> None:
    """Raise an OSError for what is no regular file, links followed: to open a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {path.readlink()}, which is not there") from None
        raise
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


def read_text(path: Path) -> str:
    """A UTF-8 file, with or without a byte order mark; raises UserError where it is not one."""
    try:
        require_file(path)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what was written there takes `path`'s place at the end.

    When writing fails, an older file at `path` stays as it was and the temporary one is removed.

    Raises:
        UserError: the file could not be written (disk full, no permission).
    """
    temporary = _beside(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except WRITE_ERRORS as error:
        kept = "; the file that was there before is untouched" if os.path.exists(path) else ""
        raise UserError(f"cannot write {path}: {reason(error)}{kept}") from error
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
    temporary, old = (_beside(folder, end) for end in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.is_dir():
            if keep:
                return
            folder.rename(old)
        temporary.rename(folder)
    except WRITE_ERRORS as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from error
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
    require_file(path)
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
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                # A line that a process was writing when it died is no JSON; its file is read again.
                with contextlib.suppress(ValueError, TypeError):
                    name, size, modified, changed, checksum = json.loads(line)
                    self._known[name] = (name, size, modified, changed, checksum)

    def get(self, path: Path) -> str | None:
        """The checksum, if the file is as it was."""
        try:
            signature = _signature(path)
        except OSError:
            return None
        hashed = self._known.get(signature[0])
        return hashed[4] if hashed is not None and hashed[:4] == signature else None

    @staticmethod
    def line(hashed: Hashed) -> str:
        return json.dumps(hashed) + "\n"

    def lines(self) -> str:
        """All that is known, each file once."""
        return "".join(map(self.line, self._known.values()))
