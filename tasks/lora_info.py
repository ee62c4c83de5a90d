"""task=lora_info: the contents of a LoRA file, or the differences of two, without a model's weights or the network."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import InstantiationException
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from foundation.errors import UserError, listing
from foundation.settings import flat_settings
from lightning_modules.lora_files.delta import Delta, relative_change
from lightning_modules.lora_files.names import LayerNames, LayerShape
from lightning_modules.lora_files.reading import DIFFUSERS_KEY, HEADER_KEY, LoRAFile, find_or_download, shown
from tasks.edit import as_list
from tasks.models import fitting_models, is_given, model_for

WIDEST = 120
# Entries of a header that are shown, and letters of a text and of JSON that is parsed.
ENTRIES, LETTERS, LONGEST_JSON = 14, 70, 100_000
# The header entries of Retouch, kohya's tools and others that are shown first.
SHOWN_FIRST = (
    *("base", "model.name", "step", "adapter.rank", "adapter.alpha", "adapter.target_modules"),
    *("ss_base_model_version", "ss_sd_model_name", "ss_output_name", "ss_network_module", "ss_network_dim"),
    *("ss_network_alpha", "ss_learning_rate", "ss_optimizer", "ss_steps", "ss_num_train_images"),
    *("modelspec.title", "modelspec.author", "modelspec.architecture", "transformer.r", "transformer.lora_alpha"),
    *("transformer.target_modules", "software.name", "training_info.step"),
)


class Description(NamedTuple):
    """Facts about a LoRA file of any program.

    Attributes:
        rows: the facts by name.
        header: the header's entries by name.
        deltas: the delta of each layer; empty if the file cannot be used.
    """

    rows: dict[str, str]
    header: dict[str, str]
    deltas: dict[str, Delta]


def lora_info(cfg: DictConfig, output_dir: Path) -> None:
    """Print a table of one LoRA, or of the differences of two."""
    loras = [] if cfg.lora is None else as_list(cfg, "lora")
    if len(loras) not in (1, 2):
        raise UserError("task=lora_info: give lora=FILE, or two to compare, lora=[ONE,OTHER]")
    facts = [_facts(cfg, LoRAFile(find_or_download(lora))) for lora in loras]
    console = Console(stderr=True)
    console.width = min(console.width, WIDEST)
    table = Table(title="Differences of two LoRAs" if len(facts) == 2 else None, title_justify="left")
    for title in ("", *map(str, loras)):
        table.add_column(Text(shown(title, 90 // len(loras))), overflow="fold")
    _add(table, [one.rows for one in facts], len(facts[0].rows) + len(facts[-1].rows))
    table.add_section()
    _add(table, [one.header for one in facts], ENTRIES)
    if len(facts) == 2:
        _add_difference(table, facts[0].deltas, facts[1].deltas)
    console.print(table)


def _facts(cfg: DictConfig, file: LoRAFile) -> Description:
    model, names = _model(cfg, file)
    parts = file.parts
    used = [key for one in parts.values() for _, key in sorted(one.items(), reverse=True)]
    schedule = file.adapter.get("rank_schedule") or {}
    rows = {
        "for": model,
        "names": shown(used[0], 100),
        "layers": f"{len(parts)}",
        "kind": counted([delta.kind for delta in file.empty.values()]),
        "rank": counted([delta.size for delta in file.empty.values()]),
        "dtype": counted([file.dtypes[key] for key in used]),
        "T-LoRA": shown(", ".join(f"{key} {one}" for key, one in schedule.items() if key != "note"), 120) or "no",
        **{owner: f"{len(keys)} tensors, ignored" for owner, keys in file.ignored.items()},
        "size": f"{decimal(file.path.stat().st_size)}, {sum(math.prod(file.shapes[key]) for key in used):,} values",
    }
    header = header_entries(file.metadata)
    try:
        rows["scale"] = counted([f"{scale:.4g}" for scale in file.scales(names).values()])
        deltas = file.read(names, "the model")
    except UserError as error:
        return Description(rows | {"DAMAGED": shown(error, 300)}, header, {})
    if len(deltas) != len(parts):
        rows["layers"] += f", {len(deltas)} by diffusers' names"
    squares = {layer: delta.square() for layer, delta in deltas.items()}
    without = " without DoRA's magnitudes" if "DoRA" in rows["kind"] else ""
    rows["norm"] = f"{sum(squares.values()) ** 0.5:.4g}, of the whole update{without}"
    if zero := [layer for layer, square in squares.items() if not square]:
        rows["ALL ZERO"] = f"{len(zero)} layers: {listing(zero)}"
    return Description(rows, header, deltas)


def _model(cfg: DictConfig, file: LoRAFile) -> tuple[str, LayerNames]:
    """Return a file's model in words, and the names of its layers, or the file's own names.

    Raises:
        UserError: it is not a LoRA, or does not fit model=.
    """
    file.empty, file.header  # noqa: B018 (the errors of an unusable file)
    chosen = is_given("model")
    if chosen or file.header:
        with suppress(*(() if chosen else (UserError, InstantiationException))):
            model = model_for(cfg, [file])
            file.match(model.names, model.base)
            if not model.guessed:
                return f"{model.name}, as {'model=' if chosen else 'its header'} says", model.names
    claimed = (file.header.get("model") or {}).get("name")
    instead = f"; its header says {shown(claimed, 40)}" if claimed else ""
    if fitting := list(fitting_models([file])):
        return f"{' or '.join(model.name for model in fitting)}, by its layers{instead}", fitting[0].names
    own = LayerNames({name: LayerShape(*delta.shape) for name, delta in file.empty.items()})
    return f"none of the models that Retouch knows{instead}", own


def counted(values: Sequence[str]) -> str:
    """List values with their frequencies, the most frequent first: `16`, or `16 (200), 8 (104)`."""
    counts = Counter(values).most_common()
    return counts[0][0] if len(counts) == 1 else listing([f"{value} ({count})" for value, count in counts], 4)


def _add(table: Table, columns: Sequence[Mapping[str, str]], most: int) -> None:
    """Add rows of plain text: nothing in them is markup. Of two columns, only rows that differ are added."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = {name: [column.get(name, "") for column in columns] for name in names}
    rows = {name: row for name, row in rows.items() if len(row) == 1 or row[0] != row[1]}
    for name, row in list(rows.items())[:most]:
        table.add_row(Text(shown(name, 40), style="bold red" if name.isupper() else ""), *map(Text, row))
    if len(rows) > most:
        table.add_row("", f"and {len(rows) - most} more entries of the header")


def _add_difference(table: Table, one: Mapping[str, Delta], other: Mapping[str, Delta]) -> None:
    common = [layer for layer, delta in one.items() if layer in other and other[layer].shape == delta.shape]
    before, after = ({layer: deltas[layer] for layer in common} for deltas in (one, other))
    if any(delta.square() for delta in before.values()):
        change = 100 * relative_change(before, after)
        table.add_section()
        table.add_row("difference", f"{change:.4g} % of the first's norm, in {len(common)} common layers")


def header_entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a header's entries by name, `SHOWN_FIRST` at the top."""
    found: dict[str, Any] = {}
    for key, text in sorted(metadata.items(), key=lambda item: (item[0] != HEADER_KEY, item[0])):
        entries = {key: text}
        with suppress(ValueError, RecursionError):  # shown as it is
            if isinstance(parsed := json.loads(text[:LONGEST_JSON]), dict):
                entries = flat_settings(parsed, "" if key in (HEADER_KEY, DIFFUSERS_KEY) else f"{key}.", levels=2)
        found |= {name: value for name, value in entries.items() if value not in ("", None, [], {})}
    return {key: shown(found[key], LETTERS) for key in dict.fromkeys([*SHOWN_FIRST, *found]) if key in found}
