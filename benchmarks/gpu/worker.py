"""The process in which parts run: a CUDA error stays with it, and what does not end must be killed."""

import contextlib
import os
import sys
import time
import traceback
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks.gpu.parts import Part

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "lightning")


def work(connection: Connection, other_end: Connection, tiny: bool, device: str | None, folder: Path) -> None:
    """Say what there is to run on, then run each part that comes, and say what came of it.

    Args:
        other_end: of the connection; while it is open here, too, the end of who asks is not seen.
        device: None for a GPU where there is one.
        folder: for what is written.
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
    """Return the result of a part."""
    print(f"=== {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    facts: dict[str, Any] = {}
    record: dict[str, Any] = {"facts": facts}
    try:
        if part.row is None:
            bench.kept = None, None
            wrong = resolve_name(part.run)(bench, facts)
        else:
            wrong = resolve_name(part.run)(bench, facts, part.row)
        bench.free()
    except Exception as error:
        wrong = [f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"]
        record["traceback"] = traceback.format_exc()
    return {"status": "failed" if wrong else "passed", "seconds": time.monotonic() - began, "wrong": wrong, **record}
