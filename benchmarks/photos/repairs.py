"""Section on data.control: LoRAs that repair photographs, from photographs alone."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from photos_pairs import REPAIRS, Pair, Photographs, held_out_photographs, repair
from PIL import Image

from benchmarks.photos.base import Base, psnr
from benchmarks.photos.options import DEFAULT
from benchmarks.photos.pairs import photographs
from benchmarks.photos.runs import LOADING, SEEDS, WORK, Figures, Section, grid, train
from lightning_modules.pretrained.repository import PHOTOS

SIDE, CROPS = 128, 3
NAMES = ("jpeg", "noise", "blur", "downscale", "grey", "hole", "border")
# Samples whose mean is measured, too: one sample of what may have been there is further from the truth than their mean.
SAMPLES = 8
# PSNR, and the interval of its gain.
SINGLE = ("LoRA", "gain, from", "to")
MEAN = (f"mean of {SAMPLES}", "gain of the mean, from", "mean, to")
# Sharpness in % of the target's.
SHARPNESS = ("sharpness of the damaged", "of LoRA", "of the mean")
COMMON = [
    *DEFAULT,
    "data.root=WORK/photographs",
    "data.val_root=null",
    "callbacks.sample_images=null",
    "~callbacks.validation",
]


def strengths(name: str) -> str:
    """Return the recipe with its strengths at 128 pixels."""
    least, most = REPAIRS[name][0]
    return f"{name}: [{least}, {most}]"


ROWS = {name: [f"data.control={{recipe: {{{strengths(name)}}}, variants: 4}}", *COMMON] for name in NAMES}


def write() -> None:
    """Write the photographs and their quarters, without pairs."""
    shutil.rmtree(folder := WORK / "photographs", ignore_errors=True)
    folder.mkdir(parents=True)
    for name, image, _ in photographs("train"):
        image.save(folder / f"{name}.png")
        half_x, half_y = image.width // 2, image.height // 2
        for index, (x, y) in enumerate(((0, 0), (half_x, 0), (0, half_y), (half_x, half_y))):
            image.crop((x, y, x + half_x, y + half_y)).save(folder / f"{name}_{index}.png")


def damaged(name: str) -> list[Pair]:
    """Return crops of held-out photographs, damaged: one of each photograph, then a second one of each, and so on."""
    photos = [*held_out_photographs(), *(control for _, control, _ in photographs("held_out"))]
    crops = [Photographs([photo], seed, least=0.5) for seed, photo in enumerate(photos)]
    random = np.random.default_rng(0)
    return [repair(one.crop(SIDE, SIDE), random, name) for _ in range(CROPS) for one in crops]


def shown(pair: Pair) -> Image.Image:
    """Return the damaged photograph at the size of the target: a border is missing, and gray as a hole."""
    place = Image.new("RGB", pair.target.size, (128, 128, 128))
    place.paste(pair.control, ((place.width - pair.control.width) // 2, (place.height - pair.control.height) // 2))
    return place


def restored(pairs: Sequence[Pair], run: Path, samples: int = 1) -> list[list[Image.Image]]:
    """Return the results of a run's LoRA for each seed of the noise."""
    with LOADING:
        base = Base(PHOTOS, SIDE)
        base.pipe.load_lora_weights(run / "lora" / "last")
    # Controls of one size share a batch.
    made: list[list[Image.Image]] = []
    for first in range(samples):
        results: dict[int, Image.Image] = {}
        for size in {pair.control.size for pair in pairs}:
            own = [index for index, pair in enumerate(pairs) if pair.control.size == size]
            images = base.edited(
                [pairs[one].control for one in own], [pairs[one].prompt for one in own], first * len(pairs)
            )
            results |= dict(zip(own, images, strict=True))
        made.append([results[index] for index in range(len(pairs))])
    return made


def figures(overrides: Sequence[str]) -> list[Figures]:
    """Return PSNRs in dB and the sharpness over the held-out photographs, of single samples and of means."""
    [name] = [name for name, row in ROWS.items() if row == overrides]
    pairs = damaged(name)
    unedited = np.array([psnr(pair.target, shown(pair)) for pair in pairs])
    found = []
    for run in train(*overrides, seeds=SEEDS[:1]):
        made = restored(pairs, run, SAMPLES)
        means = [Image.fromarray(np.mean([np.asarray(one) for one in images], 0).round().astype(np.uint8))
                 for images in zip(*made, strict=True)]  # fmt: skip
        row = {"damaged": float(unedited.mean())}
        for headers, images in ((SINGLE, made[0]), (MEAN, means)):
            gains = [psnr(pair.target, one) for pair, one in zip(pairs, images, strict=True)] - unedited
            row |= dict(zip(headers, (float((gains + unedited).mean()), *interval(gains)), strict=True))
        targets = [pair.target for pair in pairs]
        columns = ([*map(shown, pairs)], made[0], means)
        found.append(row | {name: sharpness(images, targets) for name, images in zip(SHARPNESS, columns, strict=True)})
    return found


def sharpness(images: list[Image.Image], targets: list[Image.Image]) -> float:
    """Return the mean slope of the brightness, in % of the targets'."""
    mean, of_targets = (
        np.mean([np.hypot(*np.gradient(np.asarray(one.convert("L"), np.float64))).mean() for one in some])
        for some in (images, targets)
    )
    return float(100 * mean / of_targets)


def interval(gains: np.ndarray) -> tuple[float, float]:
    """Return the interval of 95 % of the mean, by bootstrap over the photographs: their crops are alike."""
    of_photographs = gains.reshape(CROPS, -1).mean(0)
    drawn = np.random.default_rng(0).choice(of_photographs, (10000, len(of_photographs))).mean(1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def repairs_image() -> Image.Image:
    """Return a held-out photograph of each recipe, another one each, as columns: damaged, repaired, target."""
    columns = []
    for index, (name, row) in enumerate(ROWS.items(), start=1):
        pair = damaged(name)[index]
        [run] = train(*row, seeds=SEEDS[:1])
        [[result]] = restored([pair], run)
        columns.append([shown(pair), result, pair.target])
    return grid([[np.asarray(column[index]) for column in columns] for index in range(3)], enlarged=1)


SECTIONS = [
    Section(
        "repairs",
        ROWS,
        figures,
        {**dict.fromkeys(("damaged", *SINGLE, *MEAN), 1), **dict.fromkeys(SHARPNESS, 0)},
        corner="`data.control`",
        write=write,
        image=repairs_image,
        headers=list(NAMES),
        labels=("damaged", "LoRA", "target"),
    )
]
