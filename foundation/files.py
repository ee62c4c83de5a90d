"""Files: replaced atomically, read with one-line errors."""

import csv
import errno
import hashlib
import os
import pickle
import re
import shutil
import struct
import threading
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from types import ModuleType

from PIL import Image
from safetensors import SafetensorError
from yaml import YAMLError

from foundation.errors import UserError

# The errors of parsers for malformed content; RuntimeError is PyTorch's.
DAMAGED = (
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, RuntimeError, MemoryError),
    *(SyntaxError, ArithmeticError, struct.error, zlib.error, Image.DecompressionBombError, csv.Error),
)
# Characters that belong to no text: control characters except for white space, and halves of a character (surrogates).
CONTROL_CHARACTER = re.compile("[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
# Most bytes of a file that is read as a whole: a caption, or a few settings; a JSON of a model; a table, or a list of
# prompts. And of a safetensors file's header.
TEXT, MODEL_JSON, TABLE, HEADER = 2**20, 2**26, 2**27, 10 * 10**6
# safetensors raises its own for a full disk.
WRITE_ERRORS = (OSError, SafetensorError)
PICKLE = "a pickle of PyTorch"
GGUF = "a GGUF file"
# The suffixes by which programs know pickles.
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
# The first bytes of files that people have instead of safetensors, JSON or images.
KINDS_BY_START = {
    rb"GGUF": GGUF,
    rb"version https://git-lfs": "a Git LFS pointer: the file itself was not downloaded (`git lfs pull` does it)",
    rb"\s*<(!doctype html|html|head|!--)": "a web page (HTML), such as a login page: the download needs a token",
    rb"\s*\{\s*[\"}]": "a JSON text, such as an index or a server's error",
    rb"\x80[\x02-\x05]": PICKLE,
    rb"PK(\x03\x04|\x05\x06)": "a zip archive",
    rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd": "a compressed archive",
    rb".{257}ustar": "a tar archive",
    rb"\x00{512}": "a file of zeros: its download was broken off",
}


@contextmanager
def reading(path: str | Path, remedy: str, expected: str | None = None) -> Iterator[None]:
    """Turn the errors of reading a file that may be damaged, missing or unreadable into a UserError.

    Args:
        path: the file, for the message.
        remedy: the fix, in the imperative.
        expected: the kind that it should be, if it is one of `KINDS_BY_START`.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}; {remedy}") from error
    except (*DAMAGED, SafetensorError, zipfile.BadZipFile, pickle.UnpicklingError, YAMLError) as error:
        ours = isinstance(getattr(error, "obj", None), ModuleType)  # a function that this system lacks
        if ours or type(error).__name__ == "OutOfMemoryError":  # PyTorch's, of a GPU
            raise
        file = Path(path)
        is_known = not file.is_file() or file.suffix in (*PICKLES, ".json", ".jsonl", ".tar")
        kind = None if is_known else kind_of_file(file)
        what = f"damaged ({reason(error)})" if kind in (None, expected) else kind
        raise UserError(f"{path} is {what}; {remedy}") from error


def kind_of_file(path: Path) -> str | None:
    """Return the kind of a file by its first bytes, in words; None for safetensors and unknown kinds."""
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        return "an empty file"
    if start[5:9] == b"\0\0\0{":  # safetensors: the length of its header, and the header
        return None
    kind = next((kind for begin, kind in KINDS_BY_START.items() if re.match(begin, start, re.I | re.S)), None)
    # torch.save's form since 2020: a zip whose first member is NAME/data.pkl
    return PICKLE if kind == "a zip archive" and b"/data.pkl" in start else kind


def reason(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def short_name(name: str, most: int) -> str:
    """Shorten a name to at most `most` bytes, with a checksum to keep it unique."""
    raw = os.fsencode(name)
    if len(raw) <= most:
        return name
    return f"{raw[: most - 17].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:16]}"


def _beside(path: Path, end: str) -> Path:
    """Return a temporary name next to `path`, unique to this thread; file systems allow 255 bytes."""
    return path.with_name(f".{short_name(path.name, 200)}.{threading.get_native_id()}.{os.getpid()}.{end}")


def link_below(root: Path, path: Path) -> Path | None:
    """Return the first link on the way from a folder to a path below it, which may be one itself; None without one.

    Whoever writes, deletes or publishes there would follow it to another place.
    """
    parts = path.relative_to(root).parts
    places = (root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
    return next(filter(Path.is_symlink, places), None)


def require_file(path: Path) -> None:
    """Raise an OSError unless the path is a regular file or a link to one: opening a pipe would block."""
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


def is_below(path: Path, top: Path) -> bool:
    """Return whether a path leads to a place below a folder, links followed; a hub's snapshot links to its blobs."""
    top, real = Path(os.path.realpath(top)), Path(os.path.realpath(path))
    blobs = [one.parents[1] / "blobs" for one in (top, *top.parents) if one.parent.name == "snapshots"]
    return any(real.is_relative_to(one) for one in (top, *blobs))


class Packed(ABC):
    """A file inside a larger one: a member of a tar, a cell of a table. Its `str` names it in messages.

    Implementations are hashable, and travel to data workers.
    """

    @abstractmethod
    def read_bytes(self) -> bytes:
        """Return its bytes; raises the errors of reading a file."""

    @abstractmethod
    def signature(self) -> tuple[str, int, int, int]:
        """Return its name, unique on this machine, and three numbers, one of which changes whenever the bytes do."""


def read_bytes(path: Path, most: int = 2**28) -> bytes:
    """Return the bytes of a regular file; raises a ValueError if it has more than `most`, or an OSError."""
    require_file(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes, the most that are read")
    return content


def file_signature(path: Path | Packed) -> tuple[str, int, int, int]:
    """Return the name of a file, and three numbers, one of which changes whenever the bytes do."""
    if isinstance(path, Packed):
        return path.signature()
    stat = path.stat()
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_text(path: Path, most: int = TEXT) -> str:
    """Return the text of a file of at most so many bytes, as `decoded`; raises a UserError if it cannot be read."""
    try:
        return decoded(read_bytes(path, most), str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def with_short_header(path: Path) -> Path:
    """Return the path of a safetensors file; raise a ValueError if its header is larger than any model's."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if HEADER < length <= path.stat().st_size:
        raise ValueError(f"its header has {length:,} bytes, and {HEADER:,} are read")
    return path


def decoded(content: bytes, name: str) -> str:
    """Return UTF-8 as text without byte order marks; raises a UserError for other encodings and control characters."""
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff") or content[:64].count(0) * 4 > len(content[:64])
    kind = "it looks like UTF-16" if wide else ""
    try:
        text = content.decode().replace("\ufeff", "")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({kind or f'byte {error.start}'}): save it as UTF-8") from error
    if found := CONTROL_CHARACTER.search(text):
        what = kind or f"it holds the control character {found[0]!r}"
        raise UserError(f"{name} is not UTF-8 text ({what}): save it as UTF-8")
    return text


def remove_temporary(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders of killed processes, where no other process writes."""
    for path in paths:
        if path.name.split(".")[-2] == str(os.getpid()):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `path` at the end, with the permissions of an older file.

    If writing fails, an older file at `path` is kept and the temporary one removed.

    Args:
        private: nobody else may read the file.

    Raises:
        UserError: the file could not be written (disk full, no permission).
    """
    temporary = _beside(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o600 if private else S_IMODE(path.stat().st_mode) if path.is_file() else None
        if mode is not None:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        for seconds in (0.1, 0.2, 0.4, 0.8, 0.0):  # while another process reads the older file, Windows refuses
            with suppress(PermissionError) if seconds else nullcontext():
                os.replace(temporary, path)
                break
            time.sleep(seconds)
    except WRITE_ERRORS as error:
        kept = "; the file that was there before is untouched" if os.path.exists(path) else ""
        raise UserError(f"cannot write {path}: {reason(error)}{kept}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path, keep: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder, which replaces `folder` at the end; if writing fails, it is removed.

    Args:
        keep: do not replace a folder that another process has created meanwhile.

    Raises:
        UserError: the folder could not be written (disk full, no permission).
    """
    temporary, old = (_beside(folder, end) for end in ("tmp", "old"))
    for left in (temporary, old):  # by a process of the same number, as in a container, that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # safetensors lets nobody else read its files
        for path in filter(Path.is_file, temporary.rglob("*")):
            path.chmod(mode)
        if folder.is_dir():
            if keep:
                return
            try:
                folder.rename(old)
            except PermissionError:  # Windows: its lock is open
                shutil.copytree(temporary, folder, dirs_exist_ok=True)
                return
        temporary.rename(folder)
    except WRITE_ERRORS as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from error
    finally:
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def link_or_copy(source: str | Path, place: str | Path) -> None:
    """Give a file a second name; copy it if the file system has no links."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
