"""A disk that is full, and then has room again."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.fault_kinds import hooks
from benchmarks.fault_kinds.judging import BadError
from benchmarks.fault_kinds.rounds import OR_A_LINE, Round

ROOM = 1 << 28
# Where nothing can be mounted, a limit of files that still lets the commands print.
LEAST = 20_000


def mount(*arguments: str) -> bool:
    """Mount a file system; return whether that was possible, mostly for root only."""
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a disk of this many bytes at a folder; return whether that was possible."""
    folder.mkdir()
    there = mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_disk(round: Round) -> None:
    """a full disk while a run builds and trains"""
    needed = sum(bytes_below(round.shop.reference("train").folder / name) for name in ("run", "cache"))
    size = int(round.random.uniform(0.02, 1.1) * needed)
    with small_disk(round.folder / "disk", size) as mounted:
        command = round.shop.train(output_dir="disk/run", cache_dir="disk/cache")
        full = [] if mounted else [partial(hooks.limit_files, max(LEAST, size // 8))]
        round.words.append(f"{size} bytes" if mounted else f"files of {max(LEAST, size // 8)} bytes")
        text = round.run("train", *command, also=full, allowed=OR_A_LINE)
        if round.lines and not any(word in round.lines[0] for word in ("disk", "No space", "space", "too large")):
            raise BadError(f"it does not say that the disk is full: {text[-300:]}")
        if mounted and not mount("-o", f"remount,size={ROOM}", str(round.folder / "disk")):
            raise RuntimeError("the disk cannot be enlarged")
        round.run("train", *command)
        round.same_run("train", round.folder / "disk" / "run")
        round.same_cache(round.folder / "disk" / "cache")
