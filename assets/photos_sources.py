"""Collect the photographs that Photos is trained on, from packages of Debian: public domain, CC0 and CC-BY-4.0.

    python assets/photos_sources.py FOLDER      # on Debian 12, with pip install OpenEXR

FOLDER then contains PNGs, and licences.csv with the source and the licence of each. Photographs of HELD_OUT are left
out: some show what the model does with photographs that it has never seen (assets/sunset).
"""

import argparse
import csv
import fnmatch
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

# Licences that are used, as the packages' copyright files name them.
FREE = {"public-domain": "public domain", "CC0-1.0": "CC0", "CC-BY-4.0": "CC-BY-4.0"}
HELD_OUT = (
    "badlands1 beach5 city10 dune4 fields3 fields8 fog4 forest1 forest4 mountain4 sky0 sky8 snow8 valley8 water2 water9"
)
# Panoramas of Poly Haven in Blender's package, all CC0 by their license.txt: the exposure of each.
PANORAMAS = {
    "city": 1,
    "courtyard": 2,
    "forest": 2.5,
    "interior": 1,
    "night": 6,
    "studio": 4,
    "sunrise": 2,
    "sunset": 2,
}


def unpacked(package: str, folder: Path) -> Path:
    """Download a package of Debian and unpack it."""
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / package], check=True)
    return folder / package


def licences(copyright_file: Path) -> list[tuple[str, str, str]]:
    """Return pattern, licence and holder of each line of files, in the order in which later ones override earlier."""
    found = []
    for paragraph in re.split(r"\n\s*\n", copyright_file.read_text(encoding="utf-8")):
        if fields := re.match(r"Files:(.*?)\nCopyright:(.*?)\nLicense: *(\S+)", paragraph, re.DOTALL):
            patterns, holder, licence = fields.groups()
            found += [(pattern, licence, " ".join(holder.split())) for pattern in patterns.split()]
    return found


class Photograph(NamedTuple):
    name: str
    image: Image.Image
    origin: tuple[str, str, str]  # source, licence, holder


def package_photographs(package: str, images: str, listed: str, folder: Path) -> Iterator[Photograph]:
    """Yield a package's photographs under free licences.

    Args:
        images: their pattern in the package.
        listed: the folder under which the copyright file lists them.
    """
    place = unpacked(package, folder)
    known = licences(place / "usr/share/doc" / package / "copyright")
    for path in sorted(place.glob(images)):
        name = f"{listed}/{path.name}"
        licence, holder = next((rule[1:] for rule in reversed(known) if fnmatch.fnmatchcase(name, rule[0])), ("", ""))
        if licence in FREE:
            yield Photograph(path.stem, Image.open(path).convert("RGB"), (f"{package}: {name}", FREE[licence], holder))


def endless_sky(folder: Path) -> Iterator[Photograph]:
    """Yield the game's photographs of landscapes; names that end in a photographer's are not in the public domain."""
    place = "usr/share/games/endless-sky/images/land/*[0-9].jpg"
    return package_photographs("endless-sky-data", place, "images/land", folder)


def panorama_views(folder: Path) -> Iterator[Photograph]:
    """Yield views of 256x256 into Blender's panoramas, 80 degrees wide."""
    import OpenEXR

    world = unpacked("blender-data", folder) / "usr/share/blender/datafiles/studiolights/world"
    for name, exposure in PANORAMAS.items():
        light = OpenEXR.File(str(world / f"{name}.exr")).channels()["RGB"].pixels.clip(0)
        level = 0.18 / np.exp(np.log(light.mean(-1) + 1e-4).mean())
        bright = 1 - np.exp(-light * min(level, exposure) * 1.5)
        pixels = (255 * np.where(bright < 0.0031308, 12.92 * bright, 1.055 * bright ** (1 / 2.4) - 0.055)).clip(0, 255)
        for number in range(12):
            yaw, pitch = np.radians(30 * number), np.radians((-15, 12)[number % 2])
            origin = f"blender-data: world/{name}.exr", "CC0", "Greg Zaal (Poly Haven)"
            yield Photograph(f"{name}_{number:02}", view(pixels, yaw, pitch), origin)


def view(panorama: np.ndarray, yaw: float, pitch: float) -> Image.Image:
    """Return a perspective view of an equirectangular panorama (height, width, 3)."""
    side, reach = 256, np.tan(np.radians(40))
    x, y = np.meshgrid(np.linspace(-reach, reach, side), np.linspace(reach, -reach, side))
    up, ahead = y * np.cos(pitch) + np.sin(pitch), np.cos(pitch) - y * np.sin(pitch)
    height, width = panorama.shape[:2]
    column = (np.arctan2(x, ahead) + yaw) / (2 * np.pi) % 1 * width
    row = (0.5 - np.arctan2(up, np.hypot(x, ahead)) / np.pi) * height - 0.5
    left, top = np.floor(column).astype(int), np.floor(row).astype(int).clip(0, height - 2)
    right, down = (column - left)[..., None], (row - top).clip(0, 1)[..., None]
    rows = [
        (1 - right) * panorama[top + below, left % width] + right * panorama[top + below, (left + 1) % width]
        for below in (0, 1)
    ]
    return Image.fromarray(np.rint((1 - down) * rows[0] + down * rows[1]).astype(np.uint8))


def not_held_out(photographs: Iterable[Photograph]) -> Iterator[Photograph]:
    return (one for one in photographs if one.name not in HELD_OUT.split())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        (options.folder / "licences.csv").open("w", encoding="utf-8", newline="") as table,
    ):
        lines = csv.writer(table)
        lines.writerow(("file", "source", "licence", "holder"))
        found = chain(
            endless_sky(Path(folder)),
            package_photographs("lomiri-wallpapers-16.04", "usr/share/backgrounds/*.jpg", "16.04", Path(folder)),
            panorama_views(Path(folder)),
        )
        for name, image, origin in not_held_out(found):
            image.thumbnail((1280, 1280))
            image.save(options.folder / f"{name}.png")
            lines.writerow((f"{name}.png", *origin))
