"""The processes of the check: one runs the parts, another computes what the table's rows need no GPU for.

A CUDA error stays with its process, and a process that does not end must be killed.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks.gpu.parts import Part, Row

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "lightning")


def work(connection: Connection, other_end: Connection, tiny: bool, device: str | None, folder: Path) -> None:
    """Send the device and the versions, then run each part that comes, and send its result.

    Args:
        other_end: the parent's end of the connection; while this process holds it open, it cannot see the parent end.
        device: None for a GPU where there is one.
        folder: for files.
    """
    other_end.close()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which its products are not deterministic
    import torch

    from benchmarks.gpu.bench import Bench

    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = kind.type == "cuda"
    bench = Bench(torch.device("cuda", kind.index or 0) if cuda else kind, tiny, folder)
    versions = {name: version(name) for name in LIBRARIES}
    name = torch.cuda.get_device_name(bench.device) if cuda else "cpu"
    connection.send({"device": name, "cuda": torch.version.cuda, "versions": versions})
    with contextlib.suppress(EOFError):
        while True:
            connection.send(run(bench, *connection.recv()))


def run(bench: Any, name: str, part: Part) -> dict[str, Any]:
    """Return the result of a part; `ends` is in it if the process cannot run another."""
    import torch

    from benchmarks.gpu.bench import NOTHING_KEPT

    print(f"=== {name}", file=sys.stderr, flush=True)
    facts: dict[str, Any] = {}
    record: dict[str, Any] = {"facts": facts}
    try:
        if part.row is None:
            bench.kept = NOTHING_KEPT
            wrong = resolve_name(part.run)(bench, facts)
        else:
            wrong = resolve_name(part.run)(bench, facts, part.row)
        bench.free()
    except Exception as error:
        wrong = [f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"]
        record["traceback"] = traceback.format_exc()
        bench.kept = NOTHING_KEPT
        error.__traceback__ = None  # it holds tensors
        try:
            bench.free()
            torch.ones(1, device=bench.device).sum().item()
        except RuntimeError:
            record["ends"] = True
    return {"status": "failed" if wrong else "passed", "wrong": wrong, **record}


def plan(connection: Connection, other_end: Connection, tiny: bool, folder: Path, rows: Mapping[str, Row]) -> None:
    """Send each row's name and what it needs no GPU for, in this order."""
    other_end.close()
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.speed import planned

    bench = Bench(torch.device("cpu"), tiny, folder)
    for name, row in rows.items():
        try:
            connection.send((name, planned(bench, row)))
        except Exception:
            traceback.print_exc()
            connection.send((name, {}))
