"""Teach Shapes, which has only seen drawings, edits of photographs that can be computed exactly."""

import functools
import json
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw, ImageFilter

from benchmarks.shapes.runs import LOADING, WORK, Figures, Made, Section, distance, grid, samples, train, write_table
from datamodules.images.tables import FILE_COLUMNS
from lightning_modules.pretrained.repository import SHAPES
from report.images import to_image

INSTRUCTIONS = {
    "sepia": "make it sepia",
    "blur": "blur the photo",
    "night": "make it night",
    "snow": "make it snow",
    "colours": "change the colours",
}
SIZES = (64, 128)
SEEDS = (1, 2)


# Of scikit-image, in the public domain or CC0: astronaut, hubble_deep_field (NASA), rocket (SpaceX); camera, coffee,
# retina, chelsea.
TRAINED_ON = ("astronaut", "camera", "coffee", "hubble_deep_field", "retina")
HELD_OUT = ("chelsea", "rocket")
CROPS, HELD_OUT_CROPS = 40, 6


def crops(names: Sequence[str], count: int, size: int, random: Random) -> list[Image.Image]:
    """Return square crops at random places and scales, taken from the photographs in turn."""
    import skimage.data

    found = []
    for index in range(count):
        whole = Image.fromarray(getattr(skimage.data, names[index % len(names)])()).convert("RGB")
        side = round(min(whole.size) * random.uniform(0.4, 1))
        left, top = (random.randint(0, length - side) for length in whole.size)
        found.append(whole.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS))
    return found


def edited(edit: str, image: Image.Image) -> Image.Image:
    """Return the exact result of an edit."""
    if edit == "blur":
        return image.filter(ImageFilter.GaussianBlur(image.width / 32))
    if edit == "snow":
        return with_snow(image)
    pixels = np.asarray(image, dtype=np.float64)
    if edit == "sepia":
        tones = np.array([[0.393, 0.769, 0.189], [0.349, 0.686, 0.168], [0.272, 0.534, 0.131]])
        pixels = pixels @ tones.T
    elif edit == "night":
        pixels = pixels * np.array([0.25, 0.3, 0.5]) + np.array([0, 4, 20])
    else:
        pixels = with_colours(pixels)
    return Image.fromarray(pixels.clip(0, 255).round().astype("uint8"))


def with_snow(image: Image.Image) -> Image.Image:
    """Return an image under white flakes, whose places are those of every image."""
    random = Random(0)
    # Drawn at four times the size, for smooth flakes.
    side = 4 * image.width
    flakes = Image.new("L", (side, side))
    pen = ImageDraw.Draw(flakes)
    for _ in range(40):
        x, y, radius = (random.uniform(*span) * side for span in ((0, 1), (0, 1), (0.012, 0.03)))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=230)
    return Image.composite(Image.new("RGB", image.size, "white"), image, flakes.resize(image.size))


def with_colours(pixels: np.ndarray) -> np.ndarray:
    """Return pixels with the mean and deviation of a warm evening in Lab: Reinhard's transfer of colours."""
    from skimage.color import lab2rgb, rgb2lab

    lab = rgb2lab(pixels / 255)
    mean, deviation = np.array([55, 20, 30]), np.array([22, 8, 12])
    return lab2rgb((lab - lab.mean((0, 1))) / (lab.std((0, 1)) + 1) * deviation + mean) * 255


def draw() -> None:
    """Write the pairs of each size and edit."""
    for size in SIZES:
        random = Random(0)
        drawn = [
            crop
            for names, count in ((TRAINED_ON, CROPS), (HELD_OUT, HELD_OUT_CROPS))
            for crop in crops(names, count, size, random)
        ]
        for edit, prompt in INSTRUCTIONS.items():
            write_table(folder(size, edit), [(crop, edited(edit, crop), prompt) for crop in drawn], CROPS)


def folder(size: int | str, edit: str) -> str:
    """Return the name of the folder in WORK with the pairs of an edit."""
    return f"photographs-{size}-{edit}"


RESOLUTION = "model.resolution="
UNEDITED, LIMIT = "unedited", "limit"
STEPS = 200
METHODS = {
    (64, "LoRA, rank 16"): ["optimizer.lr=5e-3", "data.batch_size=8"],
    (64, "`adapter=full`"): ["adapter=full", "optimizer.lr=1e-3", "data.batch_size=8"],
    (128, "LoRA, rank 16"): ["optimizer.lr=5e-3", "data.batch_size=4"],
}


def rows() -> dict[str, list[str]]:
    """Return the rows of each size: doing nothing, the methods of training, and the autoencoder's limit."""
    found = {}
    for size in SIZES:
        common = [
            f"{RESOLUTION}{size}",
            f"trainer.max_steps={STEPS}",
            f"callbacks.sample_images.count={HELD_OUT_CROPS}",
        ]
        found[f"unedited, {size} px"] = [UNEDITED, *common]
        found |= {f"{name}, {size} px": [*common, *row] for (its, name), row in METHODS.items() if its == size}
        found[f"the autoencoder's limit, {size} px"] = [LIMIT, *common]
    return found


def made(row: Sequence[str], edit: str) -> list[list[Made]]:
    """Return the held-out samples of each seed: after the last step, or with the control or the decoded target."""
    overrides = [one for one in row if "=" in one]
    [size] = [one.removeprefix(RESOLUTION) for one in overrides if one.startswith(RESOLUTION)]
    data = folder(size, edit)
    if row == overrides:
        tables = f"data.root=WORK/{data}/train.jsonl", f"data.val_root=WORK/{data}/held_out.jsonl"
        return [list(samples(run, STEPS).values()) for run in train(*overrides, *tables, seeds=SEEDS)]
    found = []
    for line in (WORK / data / "held_out.jsonl").read_text().splitlines():
        names = json.loads(line)
        control, target = (
            np.asarray(Image.open(WORK / data / names[FILE_COLUMNS[one]]), dtype=np.float32)
            for one in ("control", "target")
        )
        found.append(Made(control, control if UNEDITED in row else decoded(target), target))
    return [found]


def psnrs(row: Sequence[str]) -> list[Figures]:
    """Return the mean PSNR of each edit in dB."""
    columns = {
        edit: [
            float(np.mean([20 * np.log10(255 / max(distance(one.result, one.target), 0.25)) for one in seed]))
            for seed in made(row, edit)
        ]
        for edit in INSTRUCTIONS
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def decoded(image: np.ndarray) -> np.ndarray:
    """Return an image encoded and decoded by the autoencoder."""
    pixels = torch.from_numpy(image / 127.5 - 1).permute(2, 0, 1)[None]
    with torch.inference_mode():
        return np.asarray(to_image(vae().decode(vae().encode(pixels).latent_dist.mode()).sample), dtype=np.float32)


@functools.cache
def vae() -> AutoencoderKL:
    """Return the autoencoder of Shapes."""
    with LOADING:
        return AutoencoderKL.from_pretrained(SHAPES / "vae").float()


def image() -> Image.Image:
    """Return two held-out photographs with each edit at 64x64, as columns, and the rows of the table and targets."""
    shown = [row for label, row in rows().items() if label.endswith(f" {SIZES[0]} px")]
    columns = [(edit, crop) for index, edit in enumerate(INSTRUCTIONS) for crop in (index % 2, 2 + index % 2)]
    results = [[made(row, edit)[0][crop].result for edit, crop in columns] for row in shown]
    return grid([*results, [made(shown[0], edit)[0][crop].target for edit, crop in columns]]).quantize(256)


SECTIONS = [
    Section(
        "photographs",
        rows(),
        psnrs,
        dict.fromkeys(INSTRUCTIONS, 1),
        draw=draw,
        image=image,
        headers=list(INSTRUCTIONS),
        labels=[*(label for label in rows() if label.endswith(f" {SIZES[0]} px")), "target"],
    )
]
