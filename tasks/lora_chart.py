"""One number for each layer of a LoRA, as a picture: blocks from left to right, kinds of layers from top to bottom."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from report.images import plot_text, write_figure
from tasks.lora_header import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

# transformer_blocks.7.attn.to_q, or kohya's double_blocks_7_img_attn_qkv.
BLOCK = re.compile(r"(\w*?(?:blocks|layers))[._](\d+)[._](.+)")
# Rows of the picture, and of layers that are in no block.
KINDS, OUTSIDE = 60, 20
# Of a row's name.
LETTERS = 44
# In inches: a row, and a column where there is room.
ROW, COLUMN, WIDEST = 0.27, 0.21, 16.0
ABSENT = "#e4e4e4"

Place = tuple[str, int]


def write_chart(values: Mapping[str, float], title: str, unit: str, zero: str, path: Path) -> None:
    """Draw a heat map of the layers of blocks, and bars of the others, as a PNG.

    Args:
        values: by layer, from 0 on; what is not finite is drawn as the largest.
        zero: what a layer of 0 is, where only some are.
    """
    from matplotlib.figure import Figure

    cells, others = _divide(values)
    rows, columns = list(cells)[:KINDS], _columns(cells)
    bars = dict(list(others.items())[:OUTSIDE])
    hidden = len(cells) - len(rows) + len(others) - len(bars)
    wide = min(WIDEST, max(9.0, 4.6 + COLUMN * len(columns)))
    heights = [max(2.0, ROW * len(rows) + 0.9)] * bool(rows) + [max(1.0, ROW * len(bars) + 0.6)] * bool(bars)
    figure = Figure(figsize=(wide, sum(heights) + 0.7), layout="constrained")
    figure.suptitle(plot_text(title), x=0.01, ha="left", fontsize=13)
    axes = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights).flat)
    top = _top(list(values.values()))
    if rows:
        image = _draw_cells(axes[0], {row: cells[row] for row in rows}, columns, top, zero)
        larger = any(value > top for value in values.values())
        bar = figure.colorbar(image, ax=axes[0], pad=0.01, aspect=30, extend="max" if larger else "neither")
        bar.set_label(unit, fontsize=11)
    if bars:
        _draw_bars(axes[-1], bars, unit, top)
    if hidden:
        figure.supxlabel(f"{hidden} more kinds of layers are not shown", fontsize=10)
    write_figure(figure, path)


def _divide(values: Mapping[str, float]) -> tuple[dict[str, dict[Place, float]], dict[str, float]]:
    """Layers in blocks, by kind and block, and the others."""
    cells: dict[str, dict[Place, float]] = {}
    others = {}
    for layer, value in values.items():
        if found := BLOCK.fullmatch(layer):
            cells.setdefault(found[3], {})[found[1], int(found[2])] = value
        else:
            others[layer] = value
    return cells, others


def _columns(cells: Mapping[str, Mapping[Place, float]]) -> list[Place]:
    """All blocks: the lists of them as they come in the model, each in order."""
    places = list(dict.fromkeys(place for row in cells.values() for place in row))
    lists = list(dict.fromkeys(name for name, _ in places))
    return sorted(places, key=lambda place: (lists.index(place[0]), place[1]))


def _top(values: Sequence[float]) -> float:
    """Where the colours end: at the largest value, unless few layers are far above all others."""
    finite = np.array([value for value in values if math.isfinite(value)] or [0.0])
    most = float(np.percentile(finite, 98))
    largest = float(finite.max())
    return (most if 0 < most < 0.5 * largest else largest) or 1.0


def _draw_cells(
    axes: "Axes", cells: Mapping[str, Mapping[Place, float]], columns: Sequence[Place], top: float, zero: str
) -> "ScalarMappable":
    import matplotlib as mpl

    grid = np.full((len(cells), len(columns)), np.nan)
    number = {place: column for column, place in enumerate(columns)}
    for row, kind in enumerate(cells.values()):
        for place, value in kind.items():
            grid[row, number[place]] = min(value, 10 * top)
    image = axes.imshow(
        np.ma.masked_invalid(grid), mpl.colormaps["viridis"].with_extremes(bad=ABSENT), aspect="auto", vmin=0, vmax=top
    )
    zeros = np.argwhere(grid == 0)
    some = 0 < len(zeros) < np.isfinite(grid).sum()
    if some:
        axes.plot(zeros[:, 1], zeros[:, 0], "x", color="orangered", markersize=5)
    lists = [name for name, _ in columns]
    starts = [column for column, name in enumerate(lists) if column == 0 or name != lists[column - 1]]
    for start in starts:
        words = f"{lists[start]} (x: {zero})" if start == 0 and some else lists[start]
        axes.text(start - 0.4, -0.7, plot_text(shown(words, LETTERS)), fontsize=11, ha="left", va="bottom")
        if start:
            axes.axvline(start - 0.5, color="white", linewidth=4)
    step = 1 if len(columns) <= 30 else 2 if len(columns) <= 64 else 5 if len(columns) <= 150 else 20
    ticks = [column for column, (_, block) in enumerate(columns) if block % step == 0]
    axes.set_xticks(ticks, [shown(columns[tick][1], 6) for tick in ticks], fontsize=9)
    axes.set_yticks(range(len(cells)), [plot_text(shown(kind, LETTERS)) for kind in cells], fontsize=10)
    axes.set_xlabel("block", fontsize=11)
    axes.tick_params(length=2)
    return image


def _draw_bars(axes: "Axes", values: Mapping[str, float], unit: str, top: float) -> None:
    lengths = [min(value, 10 * top) for value in values.values()]
    axes.barh(range(len(values)), lengths, color="#31688e", height=0.7)
    axes.set_yticks(range(len(values)), [plot_text(shown(name, LETTERS)) for name in values], fontsize=10)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, max([*lengths, 1e-12]) * 1.05)
    axes.set_xlabel(unit, fontsize=11)
    axes.set_title("outside of blocks", fontsize=11, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
