"""Make the pairs of assets/snow: photographs, and the same with snow on what is green.

    python assets/photos_snow.py assets/snow      # on Debian 12, with pip install OpenEXR

Photographs without green stay as they are. The held-out ones were in no training of Photos either.
"""

import argparse
import csv
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
from photos_sources import endless_sky, panorama_views
from PIL import Image

SIDE = 256
# Photographs with green, and those without.
TRAIN = (
    "forest_01 forest_05 forest_09 sunrise_02 sunrise_10 water3 forest5 forest0 forest3 sea0 sky0 badlands8 fields0 "
    "valley5 dune4 valley8 mountain4 water1 sea6 fields6 forest_03 forest_07 sunrise_00 sunrise_06",
    "badlands1 sky8 snow8 desert5 city0 sea1 space7 canyon1",
)
HELD = ("forest1 fog4 water2 fields3 fields8 forest4", "beach5 city10")


def with_snow(image: Image.Image) -> Image.Image:
    """Return a photograph whose green is white, bright where it was bright."""
    hue, saturation, _ = np.moveaxis(np.asarray(image.convert("HSV"), np.float64) / 255, -1, 0)
    green = (2 * (1.25 - np.abs(hue - 0.26) / 0.15)).clip(0, 1) * (5 * (saturation - 0.08)).clip(0, 1)
    pixels = np.asarray(image, np.float64) / 255
    bright = (0.12 + 1.25 * (pixels @ [0.299, 0.587, 0.114]) ** 0.55).clip(0, 1)
    white = np.stack([0.95 * bright, 0.975 * bright, bright], -1)
    return Image.fromarray(np.rint(255 * (pixels + (white - pixels) * green[..., None])).astype(np.uint8))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {one.name: one for one in chain(endless_sky(Path(folder)), panorama_views(Path(folder)))}
    rows = []
    for part, (green, other) in (("train", TRAIN), ("held_out", HELD)):
        pairs = options.folder / part
        for place in ("control_images", "training_images"):
            (pairs / place).mkdir(parents=True, exist_ok=True)
        for name in f"{green} {other}".split():
            _, image, origin = found[name]
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
            target = with_snow(image) if name in green.split() else image
            image.save(pairs / "control_images" / f"{name}.jpg", quality=92)
            target.save(pairs / "training_images" / f"{name}.jpg", quality=92)
            (pairs / "training_images" / f"{name}.txt").write_text("make it snow\n", encoding="utf-8")
            rows.append((f"{part}/{name}", *origin))
    with (options.folder / "licences.csv").open("w", encoding="utf-8", newline="") as table:
        csv.writer(table).writerows([("photograph", "source", "licence", "holder"), *rows])
