"""Measure the Photos model on photographs that it was not trained on: copies, its instructions, its limit.

    python -m benchmarks.photos.base assets/photos     # or another pipeline of this kind; --size 64, --count 12

A table: PSNR in dB of the results of stock FluxKontextPipeline at 10 steps, of the unedited photographs, and of the
targets encoded and decoded, which is the most that a result can reach.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from photos_pairs import PLAIN, REPAIRS, Pair, Photographs, copy, edit, held_out_photographs, repair
from PIL import Image

from benchmarks.labels import labelled, save_small, stacked
from benchmarks.photos.runs import grid

# Colour edits that stand for the others of their kind.
COLOURED = ("without red", "only red", "tint blue", "red to blue", "yellow to red")


def held_out(count: int, size: int) -> list[Image.Image]:
    """Return crops of photographs that nothing is trained on."""
    crops = [Photographs([image], seed, least=0.5) for seed, image in enumerate(held_out_photographs())]
    return [crops[number % len(crops)].crop(size, size) for number in range(count)]


def psnr(one: Image.Image, other: Image.Image) -> float:
    """Return the PSNR in dB; at most 99."""
    difference = np.asarray(one, np.float64) - np.asarray(other.resize(one.size), np.float64)
    return float(min(99, 20 * np.log10(255 / max(1e-6, np.sqrt(np.square(difference).mean())))))


class Row(NamedTuple):
    """Mean PSNR in dB of an instruction."""

    name: str
    result: float
    unedited: float
    limit: float


class Base:
    """A FluxKontextPipeline of small photographs."""

    def __init__(self, folder: Path, size: int) -> None:
        from diffusers import FluxKontextPipeline

        self.pipe = FluxKontextPipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.size = size

    def edited(self, controls: list[Image.Image], prompts: list[str], seed: int = 0) -> list[Image.Image]:
        """Return the results, of the noise of `seed`, `seed` + 1, ..."""
        noise = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
        sizes = {"height": self.size, "width": self.size, "max_area": self.size**2, "_auto_resize": False}
        settings = {"num_inference_steps": 10, "max_sequence_length": 16, "generator": noise, **sizes}
        return list(self.pipe(controls, prompts, **settings).images)

    @torch.no_grad()
    def decoded(self, images: list[Image.Image]) -> list[Image.Image]:
        """Return images after encoding and decoding."""
        vae, processor = self.pipe.vae, self.pipe.image_processor
        latents = vae.encode(processor.preprocess(images)).latent_dist.mode()
        return list(processor.postprocess(vae.decode(latents).sample))


def pairs_of(name: str, images: list[Image.Image]) -> list[Pair]:
    """Return the pairs of an instruction: the name of an edit, `copy`, or `repair NAME`."""
    random = np.random.default_rng(0)
    if name == "copy":
        return [copy(image, random) for image in images]
    kind, _, recipe = name.partition(" ")
    if kind == "repair":
        return [repair(image, random, recipe) for image in images]
    return [edit(image, random, name, turned=False) for image in images]


def measured(
    base: Base, images: list[Image.Image], names: list[str]
) -> Iterator[tuple[Row, list[Pair], list[Image.Image]]]:
    """Yield the figures of each instruction with its pairs and results."""
    for name in names:
        pairs = pairs_of(name, images)
        results = base.edited([one.control for one in pairs], [one.prompt for one in pairs])
        targets = [one.target for one in pairs]
        columns = (results, [one.control for one in pairs], base.decoded(targets))
        yield Row(name, *(float(np.mean(list(map(psnr, targets, column)))) for column in columns)), pairs, results


def names_of_edits() -> list[str]:
    """Return copies, the edits (a few of those of colours), and repairs, whose right answer is not the only one."""
    return ["copy", *PLAIN, *COLOURED, *(f"repair {name}" for name in REPAIRS if name != "border")]


def sheet(columns: list[tuple[Pair, Image.Image]], wide: int = 8) -> Image.Image:
    """Return photographs, results and answers below each other, under their instructions."""
    rows = []
    for part in (columns[start : start + wide] for start in range(0, len(columns), wide)):
        shown = [[np.asarray(one) for one in row] for row in zip(*((a, b, c) for (_, a, c, _), b in part), strict=True)]
        headers = [pair.prompt for pair, _ in part]
        rows.append(labelled(grid(shown, enlarged=1), headers, ["photograph", "result", "answer"]))
    return stacked(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--image", type=Path, help="WebP of photograph, result and answer for each instruction")
    parser.add_argument("--only", nargs="*", help="names of instructions")
    options = parser.parse_args()
    base = Base(options.folder, options.size)
    columns: list[tuple[Pair, Image.Image]] = []
    print(f"{'':20}{'result':>8}{'unedited':>10}{'limit':>8}")
    for row, pairs, results in measured(base, held_out(options.count, options.size), options.only or names_of_edits()):
        print(f"{row.name:20}{row.result:8.1f}{row.unedited:10.1f}{row.limit:8.1f}", flush=True)
        shown = len(columns) % len(pairs)
        columns.append((pairs[shown], results[shown]))
    if options.image is not None:
        save_small(sheet(columns), options.image)
