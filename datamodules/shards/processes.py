"""What tells a process from all others, on this machine and on any."""

import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


def new_name() -> str:
    """A name that no other process has, nor this one a second time."""
    host = socket.gethostname()[:40].replace(".", "-")
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def identity(pid: int) -> dict[str, Any]:
    """What tells a process from all others that this machine ever ran."""
    here = (BOOT.read_text().strip(), os.readlink(PROCESSES)) if BOOT.exists() and PROCESSES.exists() else None
    return {"machine": here, "pid": pid, "started": _started(pid)}


def _started(pid: int) -> float:
    """When a process was started; in clock ticks since the machine's start, where a clock that is set changes nothing.

    Source: proc_pid_stat(5), field 22.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):  # no such process (any more), or another system
        return psutil.Process(pid).create_time()


def is_running(sign: bytes) -> bool | None:
    """Whether the process that gave a sign of life runs; None where it is not known: it is another machine's."""
    try:
        known = json.loads(sign)
        here = bool(known["machine"]) and known["machine"] == list(identity(os.getpid())["machine"] or ())
        if not here:
            return None
        zombie = psutil.Process(known["pid"]).status() == psutil.STATUS_ZOMBIE
        return not zombie and _started(known["pid"]) == known["started"]
    except psutil.NoSuchProcess:
        return False
    except (ValueError, KeyError, TypeError):
        return None


class Seen:
    """What this process has seen of others' signs of life.

    Attributes:
        certain: those that live, or did, for certain: on this machine, or by a sign that was seen to change.
    """

    def __init__(self) -> None:
        self.certain: set[str] = set()
        self._last: dict[str, tuple[bytes, float]] = {}  # by process its last sign, and when it was new

    def is_alive(self, process: str, sign: bytes, stale: float) -> bool | None:
        """Whether a process is at work; None if it has been silent for `stale` seconds, and False if it has ended."""
        running = is_running(sign)
        if running is False:
            return False
        before, since = self._last.get(process, (None, 0.0))
        if sign != before:
            since = now()
            self._last[process] = sign, since
        if running or (before is not None and sign != before):
            self.certain.add(process)
        return True if now() - since < stale else None


def now() -> float:
    """Seconds, of those too in which the machine was suspended, where its system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
