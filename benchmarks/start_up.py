"""The time from the command to the first step at real widths, in parts.

    python benchmarks/start_up.py --depth 4
    python benchmarks/start_up.py --folder FLUX.1-Kontext-dev --device cuda

Writes a transformer of the real widths with random weights (few blocks), unless a folder is given, and loads it as
training does: quantized anew, the first time with what it takes to keep the result, and the second time from there.
`read` is reading its files and nothing else. Before each, files are dropped from memory where allowed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from benchmarks.memory import compose, random_batch, step, write_shallow
from lightning_modules.execution.checkpointing import set_checkpointing
from tasks.terminal import silence_libraries

PRECISIONS = {
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
}


def write_weights(folder: Path) -> None:
    """Random ones for the configuration that is there, in bf16."""
    import diffusers

    config = json.loads((folder / "transformer" / "config.json").read_text())
    torch.set_default_dtype(torch.bfloat16)
    model: Any = getattr(diffusers, config["_class_name"]).from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "transformer")


def forget(files: list[Path]) -> None:
    """Let the system read files from the disk again."""
    for file in files:
        with file.open("rb") as opened, contextlib.suppress(OSError):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def timed(taken: dict[str, float], part: str) -> Iterator[None]:
    """Note the seconds that are spent inside."""
    start = time.perf_counter()
    yield
    taken[part] = time.perf_counter() - start


def read(files: list[Path]) -> None:
    buffer = bytearray(2**24)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux_kontext")
    parser.add_argument("--folder", help="a local repository, in place of random weights")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    silence_libraries()
    device = torch.device(options.device)
    taken: dict[str, float] = {}
    with timed(taken, "imports"):
        subprocess.run([sys.executable, "-c", "import train, lightning_modules.families.flux.module"], check=True)
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = options.folder or temporary
        if folder == temporary:
            write_shallow(options.model, options.depth, folder)
            write_weights(Path(folder))
        files = sorted((Path(folder) / "transformer").glob("*.safetensors"))
        gigabytes = sum(file.stat().st_size for file in files) / 1e9
        print(f"{options.model}, {gigabytes:.2f} GB of weights on {device}; imports {taken['imports']:.1f} s")
        for precision in options.precisions:
            forget(files)
            with timed(taken, "read"):
                read(files)
            cfg = compose(options.model, folder, "bfloat16", *PRECISIONS[precision])
            with timed(taken, "settings"):
                module = instantiate(cfg.model, _convert_="all")
            forget(files)
            with timed(taken, "load"):
                module.transformer = module.base.source.load(device)
            with timed(taken, "adapter"):
                module.execution.adapt(module.transformer)
            set_checkpointing(module.transformer, "full", module.adapter.bind_rank_mask)
            with timed(taken, "first step"):
                step(module, random_batch(module, options.side, 1, device))
            parts = ", ".join(f"{part} {taken[part]:.2f} s" for part in ("settings", "adapter", "first step"))
            speeds = ", ".join(
                f"{part} {taken[part]:.1f} s ({gigabytes / taken[part]:.2f} GB/s)" for part in ("read", "load")
            )
            print(f"  {precision}: {speeds}, {parts}", flush=True)
            del module


if __name__ == "__main__":
    main()
