"""LoRA files as they come to task=export: read for one model, and what is known of their making."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.errors import UserError, printable
from lightning_modules.adapters.formats.find import PEFT_WEIGHTS_NAME, WEIGHTS_NAME
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.written import FORMATS
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.low_rank import LowRank, merged
from lightning_modules.adapters.rank_mask import RankGate, read_rank_gate
from lightning_modules.adapters.ranks import PATTERNS, Ranks
from lightning_modules.adapters.update import Update
from tasks.models import KnownModel
from tasks.terminal import log


class ReadLoRA:
    """A LoRA file and the updates that are in it.

    Raises:
        UserError: it is no LoRA of the model.
    """

    def __init__(self, file: LoRAFile, model: KnownModel) -> None:
        self.path = file.path
        self.file = file
        self.updates = file.read(model.names, model.base)

    @cached_property
    def gate(self) -> RankGate | None:
        """Of a T-LoRA whose rank follows the timestep."""
        gate = read_rank_gate(self.path)
        if gate is None or gate.schedule.kind == "constant":
            return None
        if other := [name for name, update in self.updates.items() if update.divisor != gate.rows]:
            raise UserError(f"{self.path} is damaged: {other[0]} is not of the rank {gate.rows} of its rank schedule")
        return gate


class LoRA(NamedTuple):
    """What is written: updates of layers, and what there is to say of their making.

    Attributes:
        header: of the file.
        scale: alpha / rank as they were trained; None where that is not known, or not the same for all.
    """

    updates: dict[str, Update]
    header: dict[str, Any]
    scale: float | None

    @property
    def is_dora(self) -> bool:
        """Whether it scales rows of the updated weights."""
        return any("magnitude" in update.tensors() for update in self.updates.values())

    @property
    def kind(self) -> str:
        """As `Update.kind`, of all together."""
        return kind_of(self.updates.values())

    @property
    def rank(self) -> int:
        """The largest of its layers, of a LoRA."""
        return max(update.divisor or 0 for update in self.updates.values())

    def header_of(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """The header of a file of these weights, whose rank follows no schedule; `made` says how it was made."""
        header = dict(self.header)
        if "adapter" in header:
            adapter = {key: value for key, value in header["adapter"].items() if key != "rank_schedule"}
            trained = Ranks.of_header(adapter) if self.kind == "LoRA" else None
            ranks = {layer: update.divisor for layer, update in self.updates.items()}
            other = trained is None or any(trained.rank_of(layer) != rank for layer, rank in ranks.items())
            if self.kind == "LoRA" and other:
                adapter = {key: value for key, value in adapter.items() if key not in ("use_rslora", *PATTERNS)}
                adapter |= {"rank": self.rank, "alpha": self.rank * (self.scale or 1.0)}
            header["adapter"] = adapter
        return header | {"export": {**header.get("export", {}), **made}}


def alone(one: ReadLoRA) -> LoRA:
    """A LoRA as it is."""
    return LoRA(one.updates, one.file.header or {}, one.file.trained_scale)


def sum_of(ones: Sequence[ReadLoRA], weights: Sequence[float]) -> LoRA:
    """LoRAs as one, each times its weight; what is said of its making is what is true of all.

    Raises:
        UserError: one of them has no constant update of the weights.
    """
    for one in ones:
        if alone(one).kind != "LoRA":
            kind = alone(one).kind
            raise UserError(f"merge=: {one.path} is a {kind}: write its closest LoRA by rank=N, and merge that")
        if alone(one).is_dora:
            raise UserError(f"merge=: {one.path} is a DoRA, which scales whole rows of weights: it cannot be added up")
        if one.gate is not None:
            raise UserError(
                f"merge=: {one.path} is a T-LoRA, whose rank follows the timestep: write it with task=export rank=N "
                "first, and merge that file"
            )
    headers = [one.file.header or {} for one in ones]
    bases = dict.fromkeys(str(header["base"]) for header in headers if "base" in header)
    if len(bases) > 1:
        log.warning(f"note: they were trained on different models: {', '.join(bases)}")
    header = next((header for header in headers if "model" in header), {})
    adapters = [header.get("adapter", {}) for header in headers]
    shared = {
        key: value for key, value in adapters[0].items() if all(adapter.get(key) == value for adapter in adapters)
    }
    scales = {one.file.trained_scale for one in ones}
    kept = {key: value for key, value in header.items() if key not in ("step", "export")} | {"adapter": shared}
    loras = [{name: one for name, one in each.updates.items() if isinstance(one, LowRank)} for each in ones]
    return LoRA(dict(merged(loras, weights)), kept, scales.pop() if len(scales) == 1 else None)


def title(path: Path) -> str:
    """What a LoRA file is of, in a word: its own name, or that of its run.

    outputs/snow/lora/last -> snow; outputs/snow/lora/step-000200 -> snow_step-000200; a job of a sweep has the sweep's.
    """
    path = Path(printable(str(path.absolute())))
    if path.name not in (WEIGHTS_NAME, PEFT_WEIGHTS_NAME):
        return re.sub(rf"_({'|'.join(FORMATS)})$", "", path.stem)
    folder = path.parent
    if folder.parent.name != "lora":
        return folder.name
    run = folder.parent.parent
    name = f"{run.parent.name}_{run.name}" if run.name.isdigit() else run.name
    return name if folder.name == "last" else f"{name}_{folder.name}"
