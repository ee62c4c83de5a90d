"""What tells a process from all others, on this machine and on any."""

import json
import os
import secrets
import socket
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
    except FileNotFoundError:  # no such process, or another system
        return psutil.Process(pid).create_time()


def has_ended(sign: bytes) -> bool:
    """Whether a sign of life is of a process of this machine that is no more."""
    try:
        known = json.loads(sign)
        here = bool(known["machine"]) and known["machine"] == list(identity(os.getpid())["machine"] or ())
        started = _started(known["pid"])
        zombie = psutil.Process(known["pid"]).status() == psutil.STATUS_ZOMBIE
        return here and (zombie or started != known["started"])
    except psutil.NoSuchProcess:
        return here
    except (ValueError, KeyError, TypeError):
        return False
