"""Checksums of files, computed again only if a file may have changed."""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foundation.files import Packed, file_sha256, file_signature, require_file

# A file's path, size, modification and change time in ns, and sha256; then further facts to remember about it.
Hashed = tuple[Any, ...]


def hash_file(path: Path | Packed) -> Hashed:
    """Return the checksum of a file, with the size and times that would reveal a change."""
    if isinstance(path, Packed):
        return (*path.signature(), hashlib.sha256(path.read_bytes()).hexdigest())
    require_file(path)
    return (*file_signature(path), file_sha256(path))


class FileHashes:
    """Known checksums of files, valid while size and times are the same.

    Args:
        paths: files with lines as `line` writes them; of several lines about a file the latest state counts.
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
                        if name not in self._known or changed >= self._known[name][3]:
                            self._known[name] = (name, size, modified, changed, checksum, *more)

    def get(self, path: Path | Packed) -> str | None:
        """Return the checksum, or None if the file is new or has changed."""
        return (self.known(path) or [None] * 5)[4]

    def known(self, path: Path | Packed) -> Hashed | None:
        """Return all known facts about the file; None if it is new or has changed."""
        try:
            signature = file_signature(path)
        except OSError:
            return None
        hashed = self._known.get(signature[0])
        return hashed if hashed is not None and hashed[:4] == signature else None

    @staticmethod
    def line(hashed: Hashed) -> str:
        """Return a file's facts as a line of a list: a checksum of the line, and JSON."""
        text = json.dumps(hashed)
        return f"{zlib.crc32(text.encode())} {text}\n"
