"""task=lora_info: the contents of a LoRA file, or the differences of two, without a model's weights or the network."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from datamodules.errors import UserError, printable
from lightning_modules.adapters.rank_mask import read_rank_gate
from lightning_modules.lora_files.arithmetic import inner, squared_difference
from lightning_modules.lora_files.delta import Delta
from lightning_modules.lora_files.find import find_or_download
from lightning_modules.lora_files.names import LayerNames, LayerShape, program_of
from lightning_modules.lora_files.reading import DIFFUSERS_KEY, HEADER_KEY, LoRAFile
from tasks.edit import as_list
from tasks.models import fitting_models, model_for

WIDEST = 120
# Lines of a header, and layers that are named.
ENTRIES, LAYERS = 12, 3
# Letters of a text from a file, of a path, and of a header that is parsed.
LETTERS, PATH, LONGEST = 70, 48, 100_000
# Header entries that are shown elsewhere: model.base is the one that counts, and the schedule has a row.
SHOWN_ELSEWHERE = ("model.pre", "model.max_non", "model.sampling", "adapter.rank_schedule")
# The header entries of Retouch, kohya's tools and others that are shown first.
FIRST = (
    *("base", "model.name", "step", "adapter.rank", "adapter.alpha", "adapter.target_modules"),
    *("ss_base_model_version", "ss_sd_model_name", "ss_output_name", "ss_network_module", "ss_network_dim"),
    *("ss_network_alpha", "ss_learning_rate", "ss_optimizer", "ss_steps", "ss_num_train_images"),
    *("modelspec.title", "modelspec.architecture", "transformer.r", "transformer.lora_alpha"),
    *("transformer.target_modules", "software.name", "training_info.step"),
)


def lora_info(cfg: DictConfig, output_dir: Path) -> None:
    """Print a table of one LoRA, or of the differences of two."""
    loras = [] if cfg.lora is None else as_list(cfg, "lora")
    if len(loras) not in (1, 2):
        raise UserError("task=lora_info: give lora=FILE, or two to compare, lora=[ONE,OTHER]")
    facts = [LoRAFacts.of(cfg, LoRAFile(find_or_download(lora))) for lora in loras]
    console = Console(stderr=True)
    console.width = min(console.width, WIDEST)
    if len(facts) == 1:
        console.print(_one_table(facts[0]))
    else:
        console.print(_comparison(facts[0], facts[1], [shown_end(str(lora), 44) for lora in loras]))


@dataclass(frozen=True)
class LoRAFacts:
    """Facts about a LoRA file of any program.

    Attributes:
        file: the file.
        model: its model, in words.
        names: of that model's layers, or the file's own.
    """

    file: LoRAFile
    model: str
    names: LayerNames

    @classmethod
    def of(cls, cfg: DictConfig, file: LoRAFile) -> "LoRAFacts":
        """Find out a file's model.

        Raises:
            UserError: it is no LoRA, or does not fit model=.
        """
        file.empty, file.header  # noqa: B018 (the errors of an unusable file)
        chosen = any(override.startswith("model=") for override in HydraConfig.get().overrides.task)
        claimed = shown(((file.header or {}).get("model") or {}).get("name") or "", 40)
        if chosen or file.header:
            try:
                model = model_for(cfg, [file])
                file.match(model.names, model.base)
                if not model.guessed:
                    return cls(file, f"{model.name}, as {'model=' if chosen else 'its header'} says", model.names)
            except (UserError, InstantiationException):
                if chosen:
                    raise
        instead = f"; its header says {claimed}" if claimed else ""
        if fitting := list(fitting_models([file])):
            words = f"{' or '.join(model.name for model in fitting)}, by its layers"
            return cls(file, words + instead, fitting[0].names)
        shapes = {name: delta.shape for name, delta in file.empty.items()}
        own = LayerNames({name: LayerShape(out or width, width) for name, (out, width) in shapes.items()})
        return cls(file, f"none of the models that Retouch knows{instead}", own)

    @cached_property
    def deltas(self) -> dict[str, Delta]:
        """Deltas by layer; empty if some values are not finite."""
        return {} if self.not_finite else self.file.read(self.names, "the model")

    @cached_property
    def norms(self) -> dict[str, float]:
        """Frobenius norm of each layer's delta."""
        return {layer: max(delta.square(), 0.0) ** 0.5 for layer, delta in self.deltas.items()}

    @cached_property
    def not_finite(self) -> list[str]:
        """Names of the tensors with values that are not finite."""
        with self.file.opened() as read_tensor:
            keys = [key for parts in self.file.parts.values() for key in parts.values()]
            return [key for key in keys if not read_tensor(key).float().isfinite().all()]

    def rows(self) -> dict[str, str]:
        """Return the facts by their names."""
        file, parts = self.file, self.file.parts
        deltas = list(file.empty.values())
        used = [key for one in parts.values() for _, key in sorted(one.items(), reverse=True)]
        scales = counted([round(scale, 4) for scale in file.scales(self.names).values()])
        doras = sum("magnitude" in one for one in parts.values())
        values = sum(math.prod(file.shapes[key]) for key in used)
        rows = {
            "for": self.model,
            "names": f"{counted([program_of(key) for key in used])}: {shown(used[0], 90)}",
            "layers": f"{len(parts)}",
            "kind": counted([delta.kind for delta in deltas]),
            "rank": counted([delta.size for delta in deltas]),
            "scale": scales,
            "dtype": counted([file.dtypes[key] for key in used]),
            "DoRA": f"in {doras} of {len(parts)} layers" if doras else "no",
            "T-LoRA": _schedule(file),
            **{owner: f"{len(keys)} tensors, ignored" for owner, keys in file.ignored.items()},
            "size": f"{decimal(file.path.stat().st_size)}, {values:,} values",
        }
        if len(self.deltas) not in (0, len(parts)):
            rows["layers"] += f", {len(self.deltas)} by diffusers' names"
        if self.not_finite:
            bad = ", ".join(shown(key, 90) for key in self.not_finite[:LAYERS])
            return rows | {"NOT FINITE": f"{len(self.not_finite)} tensors, training diverged: {bad}"}
        without = " without DoRA's magnitudes" if doras else ""
        rows["norm"] = f"{math.hypot(*self.norms.values()):.4g}, of the whole update{without}"
        if zero := [layer for layer, norm in self.norms.items() if not norm]:
            rows["ALL ZERO"] = f"{len(zero)} layers: {', '.join(shown(layer) for layer in zero[:LAYERS])}"
        return rows


def _schedule(file: LoRAFile) -> str:
    """Describe a T-LoRA's rank schedule."""
    try:
        gate = read_rank_gate(file.path)
    except UserError as error:
        return shown(str(error).removeprefix(f"{file.path} "), 150)
    if gate is None:
        return "no"
    one = gate.schedule
    rows = f", of {gate.width} rows each" if gate.width > 1 else ""
    return f"{one.kind}, {one.min_rank} to {one.rank} components{rows}, alpha_rank_scale {one.alpha_rank_scale:g}"


def counted(values: Sequence[Any], most: int = 4) -> str:
    """List values with their frequencies, the most frequent first: `16`, or `16 (200), 8 (104)`."""
    texts = {value: f"{value:g}" if isinstance(value, float) else str(value) for value in values}
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return texts[counts[0][0]]
    listed = ", ".join(f"{texts[value]} ({count})" for value, count in counts[:most])
    return listed + (f" and {len(counts) - most} other values" if len(counts) > most else "")


def _one_table(facts: LoRAFacts) -> Table:
    table = _table(shown_end(str(facts.file.path), 76), ["", ""])
    for name, value in facts.rows().items():
        _add(table, name, value)
    ordered = sorted(facts.norms, key=lambda layer: -facts.norms[layer])
    if ordered:
        _add(table, "largest", _listed(facts.norms, ordered[:LAYERS]))
        _add(table, "smallest", _listed(facts.norms, ordered[: -LAYERS - 1 : -1]))
    table.add_section()
    header = header_entries(facts.file.metadata)
    for key in list(header)[:ENTRIES]:
        _add(table, key, header[key])
    if len(header) > ENTRIES:
        _add(table, "", f"and {len(header) - ENTRIES} more entries in the header")
    if not header:
        _add(table, "header", "empty")
    return table


def _comparison(one: LoRAFacts, other: LoRAFacts, columns: Sequence[str]) -> Table:
    """Compare the facts, the headers and the deltas of two LoRAs."""
    table = _table("Differences of two LoRAs", ["", *columns])
    rows = [facts.rows() for facts in (one, other)]
    for name in dict.fromkeys([*rows[0], *rows[1]]):
        if rows[0].get(name) != rows[1].get(name):
            _add(table, name, *(row.get(name, "") for row in rows))
    table.add_section()
    headers = [header_entries(facts.file.metadata) for facts in (one, other)]
    different = [key for key in dict.fromkeys([*headers[0], *headers[1]]) if headers[0].get(key) != headers[1].get(key)]
    for key in different[:ENTRIES]:
        _add(table, key, *(header.get(key, "") for header in headers))
    if len(different) > ENTRIES:
        _add(table, "", f"and {len(different) - ENTRIES} more entries of the headers")
    # A rotation of inputs has no matrix to compare with that of a weight.
    shapes = [{name: (*up.shape, up.kind == "OFT") for name, up in facts.deltas.items()} for facts in (one, other)]
    common = [layer for layer, shape in shapes[0].items() if shapes[1].get(layer) == shape]
    if not common:
        return table
    table.add_section()
    squares = [sum(facts.norms[layer] ** 2 for layer in common) for facts in (one, other)]
    difference = sum(squared_difference(one.deltas[layer], other.deltas[layer]) for layer in common)
    if all(squares):
        change = 100 * (difference / squares[0]) ** 0.5
        product = sum(inner(one.deltas[layer], other.deltas[layer]) for layer in common)
        _add(table, "difference", f"{change:.4g} % of the first's norm, in {len(common)} common layers")
        _add(table, "cosine", f"{product / math.prod(squares) ** 0.5:.4f}")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=any(columns))
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    return table


def _add(table: Table, name: str, *values: str) -> None:
    """Add a row of plain text: nothing in it is markup."""
    warning = "bold red" if name.isupper() and any(values) else ""
    table.add_row(Text(shown(name, 40), style=warning), *(Text(value) for value in values))


def _listed(values: Mapping[str, float], layers: Sequence[str]) -> str:
    return "\n".join(f"{values[layer]:.4g}  {shown(layer, 90)}" for layer in layers)


def shown(text: Any, most: int = LETTERS) -> str:
    """Return a file's text as part of one line: shortened, and without characters that move the cursor."""
    start = printable(str(text)[: most + 1])  # it may have megabytes
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def shown_end(text: str, most: int) -> str:
    """Return the end of a path, which tells more than its beginning."""
    return shown(text if len(text) <= most else f"...{text[3 - most :]}", most)


def header_entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a header's entries by name, those of `FIRST` first."""
    found = {name: value for key, text in metadata.items() for name, value in _entries(key, text)}
    return {key: found[key] for key in dict.fromkeys([*FIRST, *found]) if key in found}


def _entries(key: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield a header's entry, or those of its JSON."""
    found = [(key, text)]
    if len(text) <= LONGEST and text[:1] in "{[":
        try:
            value = json.loads(text)
            if isinstance(value, dict):
                ours = key in (HEADER_KEY, DIFFUSERS_KEY)
                found = [(name, str(one)) for name, one in (_flat("", value, 2) if ours else _flat(key, value, 1))]
        except (ValueError, RecursionError):
            pass  # shown as it is
    for name, value in found:
        if not name.startswith(SHOWN_ELSEWHERE) and value not in ("", "None", "null", "[]", "{}"):
            yield name, shown_end(value, PATH) if value.startswith("/") else shown(value)


def _flat(start: str, value: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        name = f"{start}.{key}" if start else key
        if isinstance(one, dict) and depth > 1:
            yield from _flat(name, one, depth - 1)
        else:
            yield name, one
