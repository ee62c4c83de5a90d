"""task=lora_info: what a LoRA file is, or what differs between two; neither weights of a model nor network are used."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from datamodules.errors import UserError
from lightning_modules.adapters.formats.find import find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.low_rank import inner, squared_difference
from tasks.edit import as_list
from tasks.lora_chart import write_chart
from tasks.lora_facts import LoRAFacts, facts_of
from tasks.lora_header import end_of, entries, shown
from tasks.terminal import log

WIDEST = 120
# Lines of a header, and layers that are named.
ENTRIES, DIFFERENT, LAYERS = 12, 20, 3
CHART = "lora_info.png"
# %, below which two updates are the same to float32's rounding.
EQUAL = 1e-3


def lora_info(cfg: DictConfig, output_dir: Path) -> None:
    """Print what is in one LoRA, or what differs between two, and draw lora_info.png."""
    loras = [] if cfg.lora is None else as_list(cfg, "lora")
    if len(loras) not in (1, 2):
        raise UserError("task=lora_info: give lora=FILE, or two to compare, lora=[ONE,OTHER]")
    facts = [facts_of(cfg, LoRAFile(find_or_download(lora))) for lora in loras]
    chart = output_dir / CHART
    chart.unlink(missing_ok=True)  # of another time
    names = [end_of(str(lora), 44) for lora in loras]
    tables = [_one(facts[0]) if len(facts) == 1 else _two(facts[0], facts[1], names)]
    if len(facts) == 1:
        values = facts[0].norms
        title, unit, zero = f"Update of each layer: {names[0]}", "Frobenius norm of the update", "all zero"
    else:
        values = {layer: 100 * change for layer, change in changes(facts[0], facts[1]).items()}
        title = f"Difference of each layer: {names[1]}\nfrom {names[0]}"
        unit, zero = "relative difference, %", "equal"
        if values:
            tables.append(_differences(facts[0], facts[1], values))
        if values and max(values.values()) < EQUAL and not magnitude_change(facts[0], facts[1]):
            values = {}
            log.info("the updates of all layers that both have are the same, to rounding")
    console = Console(stderr=True)
    console.width = min(console.width, WIDEST)
    console.print(*tables)
    if values:
        write_chart(values, title, unit, zero, chart)
        log.info(f"done: {chart}")


def changes(one: LoRAFacts, other: LoRAFacts) -> dict[str, float]:
    """How large the difference of two updates is beside the first, of each layer that both have in equal size."""
    found = {}
    for layer in _common(one, other):
        difference = squared_difference(one.updates[layer], other.updates[layer]) ** 0.5
        norm = one.norms[layer]
        found[layer] = difference / norm if norm else math.inf if difference else 0.0
    return found


def magnitude_change(one: LoRAFacts, other: LoRAFacts) -> float:
    """How far DoRA's magnitudes differ, relative to the first's; infinite where only one of a layer's has some."""
    different = whole = 0.0
    for layer in _common(one, other):
        first, second = (facts.updates[layer].tensors().get("magnitude") for facts in (one, other))
        if (first is None) != (second is None):
            return math.inf
        if first is not None and second is not None:
            different += float((first - second).double().square().sum())
            whole += float(first.double().square().sum())
    return (different / whole) ** 0.5 if whole else 0.0


def _common(one: LoRAFacts, other: LoRAFacts) -> list[str]:
    # A turn of inputs is no update of weights that others could be compared with.
    sides = [{name: (*up.sides, up.kind == "OFT") for name, up in facts.updates.items()} for facts in (one, other)]
    return [layer for layer, size in sides[0].items() if sides[1].get(layer) == size]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=any(columns))
    for name in ("", *columns):
        table.add_column(Text(name), overflow="fold")
    return table


def _add(table: Table, name: str, *values: str) -> None:
    """A row; all that stands in it is only text."""
    warning = "bold red" if name.isupper() and any(values) else ""
    table.add_row(Text(shown(name, 40), style=warning), *(Text(value) for value in values))


def _one(facts: LoRAFacts) -> Table:
    table = _table(end_of(str(facts.file.path), 76), [""])
    for name, value in facts.rows().items():
        _add(table, name, value)
    ordered = sorted(facts.norms, key=lambda layer: -facts.norms[layer])
    if ordered:
        _add(table, "largest", _listed(facts.norms, ordered[:LAYERS]))
        _add(table, "smallest", _listed(facts.norms, ordered[: -LAYERS - 1 : -1]))
    table.add_section()
    header = entries(facts.file.metadata)
    for key in list(header)[:ENTRIES]:
        _add(table, key, header[key])
    if len(header) > ENTRIES:
        _add(table, "", f"and {len(header) - ENTRIES} more entries in the header")
    if not header:
        _add(table, "header", "says nothing")
    return table


def _two(one: LoRAFacts, other: LoRAFacts, columns: Sequence[str]) -> Table:
    table = _table("What differs between two LoRAs", columns)
    rows = [facts.rows() for facts in (one, other)]
    for name in dict.fromkeys([*rows[0], *rows[1]]):
        if rows[0].get(name) != rows[1].get(name):
            _add(table, name, *(row.get(name, "") for row in rows))
    table.add_section()
    headers = [entries(facts.file.metadata) for facts in (one, other)]
    common = set(_common(one, other))
    different = [key for key in dict.fromkeys([*headers[0], *headers[1]]) if headers[0].get(key) != headers[1].get(key)]
    for key in different[:DIFFERENT]:
        _add(table, key, *(header.get(key, "") for header in headers))
    if len(different) > DIFFERENT:
        _add(table, "", f"and {len(different) - DIFFERENT} more entries of the headers")
    for facts, here in ((one, 0), (other, 1)):
        alone = [layer for layer in facts.updates if layer not in common]
        if alone and common:
            _add(
                table, "only here", *(f"{len(alone)} layers: {_some(alone)}" if here == side else "" for side in (0, 1))
            )
    return table


def _differences(one: LoRAFacts, other: LoRAFacts, relative: Mapping[str, float]) -> Table:
    """Of the layers that both have.

    Args:
        relative: in %, by layer.
    """
    table = _table("", [""])
    table.title = None
    squares = [sum(facts.norms[layer] ** 2 for layer in relative) for facts in (one, other)]
    difference = sum(squared_difference(one.updates[layer], other.updates[layer]) for layer in relative)
    product = sum(inner(one.updates[layer], other.updates[layer]) for layer in relative)
    if squares[0]:
        change = 100 * (max(difference, 0.0) / squares[0]) ** 0.5
        _add(table, "difference", f"{change:.4g} % of the first's norm, in {len(relative)} layers that both have")
    if all(squares):
        _add(table, "cosine", f"{product / math.prod(squares) ** 0.5:.4f}")
    if change := magnitude_change(one, other):
        _add(table, "DoRA", f"magnitudes differ by {100 * change:.4g} %, which the difference does not count")
    ordered = sorted((layer for layer in relative if relative[layer]), key=lambda layer: -relative[layer])[:LAYERS]
    _add(table, "largest", _listed(relative, ordered, " %"))
    return table


def _listed(values: Mapping[str, float], layers: Sequence[str], unit: str = "") -> str:
    return "\n".join(f"{values[layer]:.4g}{unit}  {shown(layer, 90)}" for layer in layers)


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - LAYERS} more" if len(names) > LAYERS else ""
    return ", ".join(shown(name) for name in names[:LAYERS]) + rest
