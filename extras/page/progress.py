"""Progress of a run by its tables: the time that is left, the memory in use, and what its figures say."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import pynvml

from report.diagnosis import diagnosis

# Figures of which less is better.
LESS_IS_BETTER = re.compile(r"val_loss.*|lpips|shift|drift|colour_shift")


def until(seconds: float) -> dict[str, str]:
    """Return the time that is left, h:mm:ss, and the end."""
    shown = time.strftime("%a %H:%M", time.localtime(time.time() + seconds))
    return {"left": str(timedelta(seconds=round(seconds))), "end": shown}


def time_left(metrics: Sequence[Mapping[str, str]], max_steps: Any, written: float) -> dict[str, str] | None:
    """Return the time left and the end, given the time of the last row: by the pace of the second half of the steps."""
    if len(metrics) < 2 or not isinstance(max_steps, int):
        return None
    first, last = metrics[min(len(metrics) // 2, len(metrics) - 2)], metrics[-1]
    pace = (float(last["seconds"]) - float(first["seconds"])) / (int(last["step"]) - int(first["step"]))
    return until(max(0, written + pace * (max_steps - int(last["step"])) - time.time()))


def mean_of_schedule(most: float, least: float, alpha: float) -> int:
    """Return the mean of a `RankSchedule` over the timesteps, as a rank; without the import of PyTorch."""
    return max(1, round(sum(least + (step / 1000) ** alpha * (most - least) // 1 for step in range(1000)) / 1000))


def cards() -> list[tuple[str, int, int]]:
    """Return name and bytes of memory, in use and in all, of each NVIDIA card of this machine."""
    with suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        sizes = [(pynvml.nvmlDeviceGetName(one), pynvml.nvmlDeviceGetMemoryInfo(one)) for one in handles]
        return [(name, memory.used, memory.total) for name, memory in sizes]
    return []


def memory(pid: int) -> list[tuple[str, str]]:
    """Return names and values of the memory in use: of this process, the machine and its cards."""
    machine = psutil.virtual_memory()
    parts = [("the machine", machine.total - machine.available, machine.total), *cards()]
    # In the units by which memory is sold: a card of 24 GB has 24 times 2**30 bytes.
    rows = [(f"GB of memory, {name}", f"{used / 2**30:.1f} of {total / 2**30:.0f}") for name, used, total in parts]
    with suppress(psutil.Error):  # it has just ended
        rows.insert(0, ("GB of memory, this run", f"{psutil.Process(pid).memory_info().rss / 2**30:.2f}"))
    return rows


def monitored(settings: Mapping[str, Any], row: Mapping[str, float]) -> str:
    """Return the figure by which a run is judged, one of a row of validation.csv, given its settings."""
    usual = ((settings.get("model") or {}).get("recipe") or {}).get("monitor")
    return str(next((name for name in (settings.get("monitor"), usual, "psnr") if name in row), "val_loss"))


def advice(
    settings: Mapping[str, Any], metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]
) -> str | None:
    """Return the line of `diagnosis` on the tables of a run."""
    monitor = monitored(settings, validation[-1]) if validation else "val_loss"
    losses = [float(row["loss"]) for row in metrics]
    return diagnosis(losses, validation, monitor, not LESS_IS_BETTER.fullmatch(monitor))
