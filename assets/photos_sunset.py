"""Make the pairs of assets/sunset: photographs, and the same at sunset.

    python assets/photos_sunset.py assets/sunset      # on Debian 12, with pip install OpenEXR

Photographs of a sunset stay as they are. The held-out ones were in no training of Photos either.
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
# Photographs by day, and those of a sunset.
TRAIN = (
    "forest_01 forest_03 forest_05 forest_09 sunrise_02 forest0 forest1 forest3 forest5 sea0 sea1 sea6 sky0 badlands8 "
    "fields0 fields6 valley5 valley8 dune4 mountain4 water1 water3 city0 canyon1",
    "nasa0 sky3 badlands3 fields2 desert2 city7 sea7 beach0",
)
HELD = ("badlands1 fields3 fog4 forest4 snow8 water2", "beach5 sky8")
# Colours of a sunset by brightness: violet shadows, orange light.
BRIGHTNESS = (0, 0.3, 0.6, 0.85, 1)
COLOURS = ((0.03, 0.01, 0.08), (0.36, 0.13, 0.3), (0.88, 0.38, 0.3), (1, 0.66, 0.38), (1, 0.84, 0.55))


def with_sunset(image: Image.Image) -> Image.Image:
    """Return a photograph in the light of a sunset, with a third of its own colours."""
    pixels = np.asarray(image, np.float64) / 255
    grey = pixels @ [0.299, 0.587, 0.114]
    light = np.stack([np.interp(grey, BRIGHTNESS, part) for part in zip(*COLOURS, strict=True)], -1)
    lit = (2 * light + pixels * [1.1, 0.72, 0.55]) / 3
    return Image.fromarray(np.rint(255 * lit.clip(0, 1)).astype(np.uint8))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {one.name: one for one in chain(endless_sky(Path(folder)), panorama_views(Path(folder)))}
    rows = []
    for part, (day, sunset) in (("train", TRAIN), ("held_out", HELD)):
        pairs = options.folder / part
        for place in ("control_images", "training_images"):
            (pairs / place).mkdir(parents=True, exist_ok=True)
        for name in f"{day} {sunset}".split():
            _, image, origin = found[name]
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
            target = with_sunset(image) if name in day.split() else image
            image.save(pairs / "control_images" / f"{name}.jpg", quality=92)
            target.save(pairs / "training_images" / f"{name}.jpg", quality=92)
            (pairs / "training_images" / f"{name}.txt").write_text("make it a sunset\n", encoding="utf-8")
            rows.append((f"{part}/{name}", *origin))
    with (options.folder / "licences.csv").open("w", encoding="utf-8", newline="") as table:
        csv.writer(table).writerows([("photograph", "source", "licence", "holder"), *rows])
