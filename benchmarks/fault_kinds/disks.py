"""A disk that is full and has room again, and folders that cannot be written."""

import contextlib
import os
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


@contextmanager
def read_only_folder(folder: Path) -> Iterator[None]:
    """Temporarily make a folder read-only, for root by a mount."""
    mounted = mount("--bind", str(folder), str(folder))
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")] if path.is_dir()}
    try:
        if mounted:
            if not mount("-o", "remount,bind,ro", str(folder)):
                raise RuntimeError(f"{folder} cannot be made read-only")
        elif os.geteuid() == 0:
            raise RuntimeError("root may write everywhere, and may not mount here")
        else:
            for path in modes:
                path.chmod(0o555)
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        else:
            for path, mode in modes.items():
                path.chmod(mode)


def bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def full_disk(round: Round) -> None:
    """A run, with the building of its cache, on a disk that is full at some point, and then has room."""
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


def read_only(round: Round) -> None:
    """A folder that cannot be written: of a finished cache, of an unfinished one, of a run; then it can."""
    case = round.random.choice(["finished cache", "unfinished cache", "run", "beginning"])
    round.words.append(case)
    folder = round.folder / ("cache" if "cache" in case else "run")
    if case == "unfinished cache":
        round.kill(round.moment("build", timed=False), "predict", *round.shop.build())
    else:
        round.take_cache()
    if case == "run":
        round.kill(round.moment("train", timed=False), "train", *round.shop.train())
    folder.mkdir(exist_ok=True)
    hurt = case != "finished cache"
    with read_only_folder(folder):
        round.run("train", *round.shop.train(), allowed=OR_A_LINE if hurt else (0,))
    with contextlib.suppress(FileNotFoundError):  # a command that has failed takes an empty folder along
        folder.rmdir() if not any(folder.iterdir()) else None
    round.run("train", *round.shop.train())
    round.same_run("train")
    if case == "unfinished cache":  # it may have had all that the run needed
        round.run("predict", *round.shop.build())
    round.same_cache()
