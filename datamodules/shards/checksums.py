"""The checksums of the samples' files, which each process writes to a list of its own."""

from collections.abc import Iterable
from pathlib import Path

from datamodules.files import replacing
from datamodules.hashes import FileHashes, Hashed


class Checksums:
    """Those that are known in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self) -> FileHashes:
        """All of them; of a file that is in several lists the one that was written last."""
        lists = self.folder.glob("files*.jsonl")
        return FileHashes(sorted(lists, key=lambda path: (path.name != "files.jsonl", path.stat().st_mtime_ns)))

    def add(self, rank: int, hashed: Iterable[Hashed]) -> None:
        """Append to the list of the process with this rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"files-{rank}.jsonl").open("a", encoding="utf-8") as file:
            for one in hashed:
                file.write(FileHashes.line(one))

    def merge(self) -> None:
        """Join the lists; only one process may do this."""
        lists = list(self.folder.glob("files-*.jsonl"))
        if lists:
            with replacing(self.folder / "files.jsonl") as temporary:
                temporary.write_text(self.known().lines(), encoding="utf-8")
            for path in lists:
                path.unlink()
