"""The pairs of the study: the photographs of assets/sunset, with the instructions that Photos does not know."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from benchmarks.photos.runs import SUNSET, WORK
from datamodules.images.tables import FILE_COLUMNS

# The first photographs of the tables in which none stays as it is, and the sizes of these.
FIRST, SIZES = ("forest0", "sunrise_02", "dune4", "city0"), (24, 4, 1)


def photographs(part: str) -> Iterator[tuple[str, Image.Image, Image.Image]]:
    """Yield name, control and target of the included pairs: of `train` or `held_out`."""
    for path in sorted((SUNSET / part / "control_images").glob("*.jpg")):
        target = SUNSET / part / "training_images" / path.name
        yield path.stem, Image.open(path).convert("RGB"), Image.open(target).convert("RGB")


def night(image: Image.Image) -> Image.Image:
    """Return a photograph in moonlight."""
    pixels = np.asarray(image, np.float64) * [0.25, 0.3, 0.5] + [0, 4, 20]
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))


def pencil(image: Image.Image) -> Image.Image:
    """Return a drawing of a photograph, dark where it is darker than its surroundings."""
    grey = image.convert("L")
    around = np.asarray(grey.filter(ImageFilter.GaussianBlur(image.width / 40)), np.float64)
    bright = (np.asarray(grey) / around.clip(1)).clip(0, 1) ** 1.5
    return Image.fromarray(np.rint(255 * bright).astype(np.uint8)).convert("RGB")


MAKE_IT_SUNSET = "make it a sunset"
# Instructions that Photos does not know, the easiest first; the included pairs are those of sunset.
UNKNOWN: dict[str, tuple[str, Callable[[Image.Image], Image.Image] | None]] = {
    "sunset": (MAKE_IT_SUNSET, None),
    "night": ("make it night", night),
    "pencil": ("make it a pencil sketch", pencil),
}


def write_pairs() -> None:
    """Write the pairs of each edit into WORK/EDIT: train.jsonl, held_out.jsonl, and train-N.jsonl of N that change."""
    train, held_out = ([*photographs(part)] for part in ("train", "held_out"))
    for edit, (prompt, result) in UNKNOWN.items():
        rows = [(one, after if result is None else result(one), prompt) for _, one, after in (*train, *held_out)]
        lines = write_table(edit, rows, len(train))
        of_name = {name: line for (name, before, after), line in zip(train, lines, strict=False) if before != after}
        changed = [of_name.pop(name) for name in FIRST] + [*of_name.values()]
        for count in SIZES:
            write_lines(WORK / edit / f"train-{count}.jsonl", changed[:count] * (len(train) // count))


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines to a file."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_table(name: str, rows: Sequence[tuple[Image.Image, Image.Image, str]], train: int) -> list[str]:
    """Write pairs (control, target, instruction) into WORK/NAME: `train` for training, the rest held out.

    Returns the lines of the tables.
    """
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, (control, target, prompt) in enumerate(rows):
        names = f"{index:03d}-after.png", f"{index:03d}-before.png"
        target.save(folder / names[0])
        control.save(folder / names[1])
        lines.append(
            json.dumps(dict(zip((FILE_COLUMNS["target"], FILE_COLUMNS["control"]), names, strict=True), prompt=prompt))
        )
    write_lines(folder / "train.jsonl", lines[:train])
    write_lines(folder / "held_out.jsonl", lines[train:])
    return lines
