"""The host's memory while weights are loaded, against its bound: 1.1 times what stays + the largest tensor + 0.15 GB.

    python benchmarks/loading_memory.py                     # 1 GB of bf16, every way to load it
    python benchmarks/loading_memory.py --depth 12 --ways fp4

Each way is a process of its own, whose anonymous memory (not its pages of files, which the system takes back when it
likes) is read a thousand times a second, beyond what it had before. Weights are made up, of the real widths; --depth
blocks of each kind.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from benchmarks.made_up_weights import write_encoder, write_transformer
from benchmarks.memory import compose, write_shallow
from tasks.placement import frozen_model

ROOT = Path(__file__).parent.parent
QUANTIZED = ("fp8", "nf4", "fp4", "int8")
ON_DISK = ("fp8", "nf4", "int8")
WAYS = (
    "bf16",
    "bf16 from float32",
    *QUANTIZED,
    *(f"{name} on disk" for name in ON_DISK),
    "encoder nf4",
    "encoder nf4 from float32",
    "task=quantize",
)


def load(way: str, folder: str) -> int:
    """Load in the child process; return the bytes that remain."""
    from lightning_modules.pretrained.components import Components
    from lightning_modules.pretrained.weights import save_quantized
    from lightning_modules.quantization.quantization import nbytes
    from lightning_modules.timing import StageTimer

    host, name = torch.device("cpu"), way.split()[0]
    if name == "encoder":
        quantization = instantiate(quantization_settings("nf4"), components_to_quantize=["text_encoder_2"])
        places = {"text_encoder": None, "vae": None}
        parts = Components(folder, None, torch.bfloat16, places, lambda: host, StageTimer(), quantization)
        return nbytes(parts["text_encoder_2"])
    module = flux(folder, "nf4" if name == "task=quantize" else name)
    transformer = module.base.source.load(host)
    if name == "task=quantize":
        with tempfile.TemporaryDirectory(dir=folder) as written:
            save_quantized(transformer, module.base.source.quantization, Path(written))
    return nbytes(transformer)


def flux(folder: str, format: str | None) -> Any:
    """Build the family's module for this folder."""
    quantized = format in QUANTIZED
    more = ["model/quantization=fp8", f"model.quantization.format={format}"] if quantized else []
    return frozen_model(compose("flux_kontext", folder, "bfloat16", *more))


def quantization_settings(format: str) -> Any:
    """Return the quantization settings of a YAML."""
    from omegaconf import OmegaConf

    settings = OmegaConf.load(ROOT / "conf" / "model" / "quantization" / "fp8.yaml")
    settings.merge_with({"format": format})
    return settings


def child(way: str, folder: str) -> None:
    """Import and warm up, then load when the parent sends a line."""
    from tasks.terminal import configure_logging, silence_libraries

    configure_logging()
    silence_libraries()
    for format in QUANTIZED:
        instantiate(quantization_settings(format)).quantize(nn.Linear(64, 64, dtype=torch.bfloat16))
    flux(folder, None) if "encoder" not in way else None
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
    """Return the bytes of the largest tensor in a folder's files."""
    from safetensors import safe_open

    sizes = []
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 (not a dict)
        width = {"F32": 4, "BF16": 2, "F16": 2}
        sizes += [math.prod(one.get_shape()) * width.get(one.get_dtype(), 1) for one in slices]
    return max(sizes)


def prepare(way: str, folder: Path, depth: int) -> Path:
    """Create the repository of this way once."""
    from lightning_modules.pretrained.weights import save_quantized

    dtype = torch.float32 if way.endswith("float32") else torch.bfloat16
    if way.startswith("encoder"):
        place = folder / f"encoder-{dtype}"
        if not place.is_dir():
            write_encoder(place, dtype)
        return place
    plain = folder / f"transformer-{dtype}"
    if not plain.is_dir():
        write_transformer(plain, depth, dtype)
    if not way.endswith("on disk"):
        return plain
    place = folder / way.split()[0]
    write_shallow("flux_kontext", depth, str(place))
    module = flux(str(plain), way.split()[0])
    save_quantized(module.base.source.load(torch.device("cpu")), module.base.source.quantization, place / "transformer")
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
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
