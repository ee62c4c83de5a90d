"""Checksums of files, computed anew only where a file may have changed."""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datamodules.files import Packed, file_signature, require_file, sha256

# A file's path, size, modification and change time in ns, and sha256; and what else is to be remembered of it.
Hashed = tuple[Any, ...]


def hash_file(path: Path | Packed) -> Hashed:
    """The checksum of a file, with the size and times that would reveal a change."""
    if isinstance(path, Packed):
        return (*path.signature(), hashlib.sha256(path.read()).hexdigest())
    require_file(path)
    return (*file_signature(path), sha256(path))


class FileHashes:
    """Known checksums of files, valid as long as their size and times are the same.

    Args:
        paths: files with lines as `line` writes them; later ones override earlier ones.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known: dict[str, Hashed] = {}
        for path in paths:
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                # A damaged line, or one cut short by a killed process, is skipped, and its file hashed again.
                with contextlib.suppress(ValueError, TypeError):
                    crc32, _, text = line.partition(" ")
                    if int(crc32) == zlib.crc32(text.encode()):
                        name, size, modified, changed, checksum, *more = json.loads(text)
                        self._known[name] = (name, size, modified, changed, checksum, *more)

    def get(self, path: Path | Packed) -> str | None:
        """The checksum, or None if the file is new or has changed."""
        return (self.known(path) or [None] * 5)[4]

    def known(self, path: Path | Packed) -> Hashed | None:
        """All that is remembered of the file; None if it is new or has changed."""
        try:
            signature = file_signature(path)
        except OSError:
            return None
        hashed = self._known.get(signature[0])
        return hashed if hashed is not None and hashed[:4] == signature else None

    @staticmethod
    def line(hashed: Hashed) -> str:
        """A file's checksum as a line of a list: the line's own, and a list in JSON."""
        text = json.dumps(hashed)
        return f"{zlib.crc32(text.encode())} {text}\n"

    def lines(self) -> str:
        """All known checksums, one line per file."""
        return "".join(map(self.line, self._known.values()))
