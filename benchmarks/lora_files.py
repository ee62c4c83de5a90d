"""LoRA files at the real size: reading, checking, converting, reducing, and writing a transformer with a LoRA in it.

    python benchmarks/lora_files.py                                # FLUX.1 Kontext of full depth: 48 GB of disk
    python benchmarks/lora_files.py --depth 2 --formats bf16 fp8   # two blocks of each kind, and extraction too

Weights are made up, of the real widths. Each line has its seconds, and the most memory that it took beyond what the
process had before (pages of files are not counted).
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra.utils import instantiate

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from benchmarks.made_up_weights import write_transformer
from benchmarks.memory import compose
from lightning_modules.adapters.fusing import extract, write_fused
from lightning_modules.lora_files.compatibility import problem_in_diffusers
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import write
from lightning_modules.pretrained.transformer import TransformerSource

CPU = torch.device("cpu")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@contextmanager
def measured(rows: list[dict[str, Any]], what: str) -> Iterator[None]:
    """Temporarily measure the enclosed code as a row."""
    process, peak, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            info = process.memory_info()
            peak = max(peak, info.rss - info.shared)

    info = process.memory_info()
    before = info.rss - info.shared
    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
    rows.append({"what": what, "seconds": round(seconds, 2), "gigabytes": round(max(peak - before, 0) / 1e9, 2)})
    print(f"{what:60} {seconds:9.2f} s {rows[-1]['gigabytes']:7.2f} GB", flush=True)


def source_of(folder: Path, *more: str) -> tuple[Any, TransformerSource]:
    """Return the base of a folder, and its transformer's source."""
    module = instantiate(compose("flux_kontext", str(folder), "bfloat16", *more).model, _convert_="all")
    return module, module.base.source


def measure(folder: Path, depth: int | None, rank: int, formats: list[str]) -> list[dict[str, Any]]:
    """Return all rows."""
    rows: list[dict[str, Any]] = []
    write_transformer(folder / "base", depth)
    module, source = source_of(folder / "base")
    names = module.base.layer_names
    generator = torch.Generator().manual_seed(0)
    updates = {
        name: LowRank(
            torch.randn(rank, shape.in_features, generator=generator) / shape.in_features**0.5,
            torch.randn(shape.out_features, rank, generator=generator) * 0.01,
        )
        for name, shape in names.shapes.items()
        if "attn" in name and name.endswith(ATTENTION)
    }
    what = f"{len(updates)} layers of rank {rank}"
    file = folder / "pytorch_lora_weights.safetensors"
    with measured(rows, f"write {what}"):
        write(file, updates, {})
    with measured(rows, "read"):
        read = LoRAFile(file).read(names, "base")
    with measured(rows, "read back by diffusers"):
        assert not problem_in_diffusers(file, read, "FluxKontextPipeline", source.meta)
    with measured(rows, "write for kohya, fused layers"):
        write(folder / "kohya.safetensors", updates, {}, format="kohya", names=names)
    with measured(rows, "read kohya's, split"):
        LoRAFile(folder / "kohya.safetensors").read(names, "base")
    with measured(rows, f"SVD to rank {rank // 2}"):
        for update in updates.values():
            update.reduced(rank // 2)
    settings: dict[str, list[str]] = {
        "bf16": [],
        **{name: [f"model/quantization={'fp8' if name == 'fp8' else 'fp4'}", f"model.quantization.format={name}"]
           for name in ("fp8", "nf4", "int8_w8a8")},
    }  # fmt: skip
    for name in formats:
        target = folder / name
        _, quantized = source_of(folder / "base", *settings[name])
        with measured(rows, f"fuse, {name}"):
            rounding = write_fused(quantized, updates, target, CPU)
        if rounding is not None:
            print(f"  lost by rounding: {rounding.share:.2%} of the update")
        if name == "bf16" and depth is not None:  # seconds for each layer
            with measured(rows, f"extract rank {rank} of {len(updates)} layers"):
                _, error, _ = extract(source, str(target), rank, CPU)
            print(f"  error: {error:.2%}")
        elif name != "bf16":
            _, stored = source_of(folder / "base", f"model.transformer_name_or_path={target}")
            with measured(rows, f"fuse once more, {name} on disk"):
                rounding = write_fused(stored, updates, folder / "again", CPU)
            assert rounding is not None
            print(f"  lost by rounding: {rounding.share:.2%} of the update")
            shutil.rmtree(folder / "again")
        shutil.rmtree(target)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, help="blocks of each kind; default: all")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--formats", nargs="*", default=["bf16", "fp8", "nf4", "int8_w8a8"])
    parser.add_argument("--folder", help="where there is room; default: the temporary one")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = measure(Path(folder), given.depth, given.rank, given.formats)
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
