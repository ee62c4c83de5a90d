"""Sizes of int8 weights after lossless compression: `python benchmarks/compression.py [file.safetensors ...]`.

Bits per weight with a scale per row against a scale per tensor. Entropy is computed over chunks of 64 KiB, as nvCOMP
codes them; Huffman is zlib's, measured; `7 bits` packs values within +-63 and lists the others. At most 63
matrices of a file, spread evenly.
"""

import argparse
import math
import time
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

SHAPES = Path(__file__).parent.parent / "assets/shapes"
COLUMNS = "dB | closed form | entropy | saves | Huffman | 7 bits | Huffman MB/s | dB, tensor | entropy | saves"
OUTLIER_BITS = 16 + 8  # index in the row, value


def sample_weights(width: int) -> dict[str, list[Tensor]]:
    """Draw a matrix from each distribution."""
    torch.manual_seed(0)
    gaussian = torch.randn(1024, width)
    samples = {"Gaussian": gaussian, "Gaussian, row norms e^N(0, 0.5)": gaussian * torch.randn(1024, 1).div(2).exp()}
    samples |= {f"Student t{df}": torch.distributions.StudentT(df).sample((1024, width)) for df in (40, 6, 5, 4, 3)}
    return {f"{name}, {width}": [sample] for name, sample in samples.items()}


def chunk_entropy(values: Tensor) -> float:
    """Return the mean entropy of chunks of 64 KiB, in bits per value."""
    total = 0.0
    for chunk in values.int().add(128).split(65536):
        share = chunk.bincount().double() / len(chunk)
        total -= float(torch.special.xlogy(share, share).sum()) / math.log(2) * len(chunk)
    return total / len(values)


def measure(weights: list[Tensor], dims: int | tuple[int, int]) -> list[str]:
    """Round weights to int8 with scales over `dims`; return the cells of COLUMNS up to the speed."""
    scales = [w.abs().amax(dims, keepdim=True).clamp(min=1e-12) / 127 for w in weights]
    scaled = [w / s for w, s in zip(weights, scales, strict=True)]
    values = torch.cat([x.round().flatten() for x in scaled]).to(torch.int8)
    noise = sum(float(((x - x.round()) * s).square().sum()) for x, s in zip(scaled, scales, strict=True))
    signal = sum(float(w.square().sum()) for w in weights)
    closed = torch.cat([x.std(1) for x in scaled]).mul(math.sqrt(2 * math.pi * math.e)).log2().mean()
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(values.numpy().tobytes()) + coder.flush()
    start = time.perf_counter()
    zlib.decompress(coded, bufsize=len(values))
    speed = len(values) / (time.perf_counter() - start) / 1e6
    entropy, packed = chunk_entropy(values), 7 + OUTLIER_BITS * float((values.int().abs() > 63).double().mean())
    bits = [f"{x:.2f}" for x in (closed, entropy, 8 * len(coded) / len(values), packed)]
    return [f"{10 * math.log10(signal / noise):.1f}", *bits[:2], f"{1 - entropy / 8:.0%}", *bits[2:], f"{speed:.0f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[*SHAPES.glob("transformer/*s"), *SHAPES.glob("vae/*s")])
    cases = sample_weights(3072) | sample_weights(12288)
    for file in parser.parse_args().files:
        matrices = [w.flatten(1) for w in load_file(file).values() if w.ndim > 1 and w[0].numel() >= 64]
        cases["/".join(file.parts[-2:])] = [w.float() for w in matrices[:: max(1, len(matrices) // 32)]]
    print(f"| weights | {COLUMNS} |\n|{'---|' * 11}")
    for name, weights in cases.items():
        row, tensor = measure(weights, 1), measure(weights, (0, 1))
        print(f"| {name} | " + " | ".join([*row, tensor[0], *tensor[2:4]]) + " |", flush=True)
