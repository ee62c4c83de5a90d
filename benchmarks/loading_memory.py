"""CPU memory while weights are loaded, against its bound: 1.1 times the result + the largest tensor + 0.15 GB.

    python benchmarks/loading_memory.py                     # 1 GB of bf16 in every format, and T5
    python benchmarks/loading_memory.py --depth 12 --ways fp4

Each way is a process of its own, whose anonymous memory (without pages of mapped files) is read a thousand times a
second, beyond the amount before loading. Weights are random, of the real widths; --depth blocks of each kind.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from benchmarks.made_up_weights import write_encoder, write_gguf_file, write_scaled_file, write_transformer
from benchmarks.memory import compose, write_shallow
from cli.placement import frozen_model
from lightning_modules.pretrained.repository import meta_component

ROOT = Path(__file__).parent.parent
QUANTIZED = ("fp8", "nf4", "fp4", "int8_w8a8")
# Transformers are in bf16 on disk, T5 in float32.
WAYS = ("bf16", *QUANTIZED, "encoder nf4")
# ComfyUI's single files: the kind, and the format in memory.
SUFFIX = {"fp8_scaled": "safetensors", "gguf": "gguf"}
FILES = ("fp8_scaled fp8", "fp8_scaled nf4", "gguf bf16", "gguf fp8", "gguf nf4")


def load(way: str, folder: str) -> int:
    """Load in the child process; return the bytes that remain."""
    from lightning_modules.pretrained.components import Components
    from lightning_modules.timing import StageTimer

    host = torch.device("cpu")
    if way == "encoder nf4":
        places, nf4 = {"text_encoder": None, "vae": None}, quantization("nf4", "text_encoder_2")
        parts = Components(folder, None, torch.bfloat16, places, lambda: host, StageTimer(), nf4)
        return _bytes(parts["text_encoder_2"])
    kind, _, format = way.rpartition(" ")
    source = flux(folder, format).base.source
    return _bytes((replace(source, name=f"{folder}/{kind}.{SUFFIX[kind]}") if kind else source).load(host))


def _bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def flux(folder: str, format: str) -> Any:
    """Build the family's module for this folder."""
    quantized = format in QUANTIZED
    more = ["model/quantization=fp8", f"model.quantization.format={format}"] if quantized else []
    return frozen_model(compose("flux_kontext", folder, "bfloat16", *more))


def quantization(format: str, *components: str) -> Any:
    """Return the usual quantization in a format."""
    settings = OmegaConf.load(ROOT / "conf" / "model" / "quantization" / "fp8.yaml")
    return instantiate(settings, format=format, components_to_quantize=components)


def child(way: str, folder: str) -> None:
    """Import and warm up, then load when the parent sends a line."""
    from cli.terminal import configure_logging, silence_libraries

    configure_logging()
    silence_libraries()
    for format in QUANTIZED:
        quantization(format).quantize(nn.Linear(64, 64, dtype=torch.bfloat16))
    flux(folder, "bf16") if way != "encoder nf4" else None
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"result": load(way, folder)}), flush=True)


def anonymous(pid: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(way: str, folder: Path) -> tuple[int, int]:
    """Return the peak of additional anonymous memory while loading, and the bytes that remain."""
    command = [sys.executable, "-m", "benchmarks.loading_memory", "--child", way, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line.strip() != "ready":
        pass
    before = peak = anonymous(process.pid)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(line.strip() for line in process.stdout or ()))
    reader.start()
    process.stdin.write("go\n")
    process.stdin.flush()
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.001)
    reader.join()
    if process.returncode:
        raise RuntimeError(f"{way}: the child process failed")
    return peak - before, json.loads(lines[-1])["result"]


def largest_tensor(folder: Path) -> int:
    """Return the bytes of the largest tensor in a folder's files; a tensor of GGUF is dequantized to float32."""
    from lightning_modules.pretrained.single_file import open_file

    width = {"F32": 4, "BF16": 2, "F16": 2}
    files = [open_file(path) for path in folder.rglob("*") if path.suffix in (".safetensors", ".gguf")]
    return max(math.prod(one.shapes[name]) * width.get(dtype, 1) for one in files for name, dtype in one.dtypes.items())


def prepare(way: str, folder: Path, depth: int) -> Path:
    """Create the repository of this way once."""
    place = folder / "encoder" if way == "encoder nf4" else folder / "transformer"
    kind = way.partition(" ")[0]
    if kind in SUFFIX:
        place = folder / "files"
        if not place.is_dir():
            write_shallow("flux_kontext", depth or None, str(place))
        if not (path := place / f"{kind}.{SUFFIX[kind]}").is_file():
            (write_scaled_file if kind == "fp8_scaled" else write_gguf_file)(
                path, meta_component(str(place), "transformer")
            )
    elif not place.is_dir():
        if way == "encoder nf4":
            write_encoder(place, torch.float32)
        else:
            write_transformer(place, depth or None)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=1, help="0: all blocks")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *FILES), default=[*WAYS, *FILES])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    above = 0
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        print("GB                          stays   largest   bound   peak   seconds")
        for way in options.ways:
            repository = prepare(way, Path(temporary).absolute(), options.depth)
            start = time.monotonic()
            peak, result = measure(way, repository)
            largest = largest_tensor(repository)
            allowed = result + result // 10 + largest + 150_000_000
            above += peak > allowed
            figures = "".join(f"{value / 1e9:9.3f}" for value in (result, largest, allowed, peak))
            print(f"{way:24}{figures}{time.monotonic() - start:9.0f}{'' if peak <= allowed else '  ABOVE'}", flush=True)
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
