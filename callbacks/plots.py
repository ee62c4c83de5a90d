"""Figures of matplotlib as pictures, with words in them that users wrote."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figure(figure: "Figure", path: Path, dpi: int = 100) -> None:
    """Write a PNG; a character that the font lacks is drawn as a box, without a warning."""
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        figure.savefig(temporary, format="png", dpi=dpi)


def plain(text: str) -> str:
    """Words as they are: matplotlib sets what stands between dollars as mathematics."""
    return text.replace("$", r"\$")
