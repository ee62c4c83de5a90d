"""Transformers that were quantized once, kept on disk: the next start maps them and quantizes nothing."""

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from datamodules.errors import UserError
from datamodules.files import replacing_folder
from datamodules.shards.fingerprint import fingerprint
from datamodules.shards.stores import local_folder
from lightning_modules.pretrained.assembly import save_quantized
from lightning_modules.quantization.quantization import Quantization, nbytes

log = logging.getLogger("retouch")

# Within data.cache_dir.
FOLDER = "transformers"
# Increased when layers are quantized or written in another way.
VERSION = 1
# Written last: what the transformer was made from, and the sizes and times of its files.
MANIFEST = "manifest.json"


class QuantizedTransformer:
    """One of them.

    Args:
        folder: whose name is the fingerprint.
        parts: what the fingerprint is computed from.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.parts = dict(parts)

    @classmethod
    def of(cls, cache_dir: str, parts: Mapping[str, Any]) -> "QuantizedTransformer":
        """The one that depends on these."""
        versions = {"retouch": VERSION, **{name: version(name) for name in ("torch", "diffusers")}}
        parts = {**parts, "versions": versions}
        return cls(local_folder(cache_dir) / FOLDER / fingerprint(parts), parts)

    def is_whole(self) -> bool:
        """Whether it is there as it was written."""
        try:
            written = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))["files"]
            return bool(written) and all(_signature(self.folder / name) == facts for name, facts in written.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def is_usable(self) -> bool:
        """The same, when it is to be used now: one that is damaged is named."""
        whole = self.is_whole()
        if not whole and self.folder.is_dir():
            log.warning(f"note: {self.folder} is not as it was written: the transformer is quantized again")
        with suppress(OSError):  # not there, or read-only
            os.utime(self.folder)
        return whole

    def write(self, transformer: Any, quantization: Quantization | None, name: str) -> None:
        """Keep a transformer of this name; where that is not possible, say so and go on."""
        assert quantization is not None
        size = nbytes(transformer)
        try:
            with self._lock() as is_ours:
                if not is_ours or self.is_whole():  # another process was faster
                    return
                free = shutil.disk_usage(self.folder.parent).free
                if free < 1.1 * size:
                    raise UserError(f"{decimal(size)} are needed, {decimal(free)} are free")
                for left in self.folder.parent.glob(f".{self.folder.name}.*.tmp"):  # by a process that was killed
                    shutil.rmtree(left)
                log.info(f"keeping the quantized transformer in {self.folder}, for the next start")
                with replacing_folder(self.folder) as unfinished:
                    save_quantized(transformer, quantization, unfinished)
                    files = {path.name: _written(path) for path in sorted(unfinished.iterdir())}
                    manifest = {"name": name, "parts": self.parts, "files": files}
                    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        except (UserError, OSError, RuntimeError, MemoryError) as error:  # what was to be kept is at hand
            log.warning(f"note: the quantized transformer is not kept, so the next start quantizes again: {error}")

    def describe(self) -> str:
        """What it is, in a few words."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            return f"the transformer of {manifest['name']} in {manifest['parts']['quantization']['format']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "an unfinished or damaged transformer"

    def is_being_written(self) -> bool:
        """Whether a process of this machine does so now."""
        with self._lock() as is_ours:
            return not is_ours

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Gives whether no other process of this machine writes it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        name = self.folder.name.strip(".").partition(".")[0]  # also of an unfinished folder of its own
        with (self.folder.parent / f".{name}.lock").open("w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    yield False
                    return
            yield True


def quantized_transformers(cache_dir: Path) -> list[QuantizedTransformer]:
    """All that are kept there; and what processes that were killed have left of some."""
    folders = (path for path in sorted((cache_dir / FOLDER).glob("*")) if path.is_dir())
    return [one for one in (QuantizedTransformer(folder, {}) for folder in folders) if not one.is_being_written()]


def _signature(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _written(path: Path) -> list[int]:
    """The signature of a file that is on the disk: one cut short by a loss of power would have it, too."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    return _signature(path)
