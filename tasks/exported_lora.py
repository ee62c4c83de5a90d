"""LoRAs for task=export: read for one model, added up, and reduced in rank, with the facts that their file states."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from datamodules.errors import UserError, printable
from lightning_modules.adapters.rank_mask import RankGate, read_rank_gate
from lightning_modules.adapters.ranks import PATTERNS, Ranks
from lightning_modules.lora_files.arithmetic import relative_change, weighted_sum
from lightning_modules.lora_files.delta import Delta, LowRank
from lightning_modules.lora_files.find import PEFT_WEIGHTS_NAME, WEIGHTS_NAME
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import FORMATS
from tasks.models import KnownModel, without_network
from tasks.terminal import log


class ExportedLoRA(NamedTuple):
    """Deltas to write, and facts about their origin.

    Attributes:
        deltas: by layer.
        header: of the file.
        scale: alpha / rank in training; None if unknown, or different between layers.
        gate: of a T-LoRA whose rank follows the timestep.
    """

    deltas: dict[str, Delta]
    header: dict[str, Any]
    scale: float | None
    gate: RankGate | None = None

    @classmethod
    def read(cls, file: LoRAFile, model: KnownModel) -> "ExportedLoRA":
        """Read a file; raises UserError if it is no LoRA of the model."""
        deltas, gate, ranks = file.read(model.names, model.base), read_rank_gate(file.path), Ranks.of_file(file)
        if gate is not None and gate.schedule.kind == "constant":
            gate = None
        if gate is not None and (other := [name for name, delta in deltas.items() if delta.divisor != gate.rows]):
            raise UserError(f"{file.path} is damaged: {other[0]} does not have the rank {gate.rows} of its schedule")
        return cls(deltas, file.header or {}, None if ranks is None else ranks.scale, gate)

    @property
    def is_dora(self) -> bool:
        """True if it scales rows of the updated weights."""
        return any("magnitude" in delta.tensors() for delta in self.deltas.values())

    @property
    def kind(self) -> str:
        """Kind of its deltas."""
        return common_kind(self.deltas.values())

    @property
    def rank(self) -> int:
        """Highest rank of its layers."""
        return max(delta.divisor or 0 for delta in self.deltas.values())

    def header_of(self, export: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of a file of these deltas, without a rank schedule.

        Args:
            export: facts about the export.
        """
        header = dict(self.header)
        if "adapter" in header:
            adapter = {key: value for key, value in header["adapter"].items() if key != "rank_schedule"}
            trained = Ranks.of_header(adapter) if self.kind == "LoRA" else None
            ranks = {layer: delta.divisor for layer, delta in self.deltas.items()}
            other = trained is None or any(trained.rank_of(layer) != rank for layer, rank in ranks.items())
            if self.kind == "LoRA" and other:
                adapter = {key: value for key, value in adapter.items() if key not in ("use_rslora", *PATTERNS)}
                adapter |= {"rank": self.rank, "alpha": self.rank * (self.scale or 1.0)}
            header["adapter"] = adapter
        return header | {"export": {**header.get("export", {}), **export}}


def sum_of(loras: Sequence[ExportedLoRA], weights: Sequence[float], titles: Sequence[str]) -> ExportedLoRA:
    """Add LoRAs up, each times its weight; the header keeps the facts that hold for all of them.

    Args:
        titles: their names in messages.

    Raises:
        UserError: one of them is no constant low-rank update.
    """
    for lora, title in zip(loras, titles, strict=True):
        if lora.kind != "LoRA":
            raise UserError(f"merge=: {title} is a {lora.kind}. Write its closest LoRA by rank=N, and merge that")
        if lora.is_dora:
            raise UserError(f"merge=: {title} is a DoRA, which scales whole rows of weights: it cannot be added up")
        if lora.gate is not None:
            raise UserError(
                f"merge=: {title} is a T-LoRA, whose rank follows the timestep. Write it with task=export rank=N "
                "first, and merge that file"
            )
    headers = [lora.header for lora in loras]
    bases = dict.fromkeys(str(header["base"]) for header in headers if "base" in header)
    if len(bases) > 1:
        log.warning(f"note: they were trained on different models: {', '.join(bases)}")
    header = next((header for header in headers if "model" in header), {})
    adapters = [header.get("adapter", {}) for header in headers]
    shared = {key: value for key, value in adapters[0].items() if all(one.get(key) == value for one in adapters)}
    kept = {key: value for key, value in header.items() if key not in ("step", "export")} | {"adapter": shared}
    scales = {lora.scale for lora in loras}
    terms = [{name: one for name, one in lora.deltas.items() if isinstance(one, LowRank)} for lora in loras]
    return ExportedLoRA(dict(weighted_sum(terms, weights)), kept, scales.pop() if len(scales) == 1 else None)


def with_rank(lora: ExportedLoRA, rank: int) -> ExportedLoRA:
    """Return the closest LoRA of a rank, and log the distance."""
    if lora.is_dora:
        raise UserError(f"rank={rank}: this is a DoRA, which scales whole rows of weights: it keeps its rank")
    if lora.kind == "LoRA" and lora.rank <= rank:
        log.info(f"rank={rank}: no layer has a higher one, all stay as they are")
        return lora
    try:
        reduced = {name: delta.reduced(rank) for name, delta in lora.deltas.items()}
    except ValueError as error:
        raise UserError(f"rank={rank}: {error}. fuse=true writes a transformer that includes it") from error
    change = percent(relative_change(lora.deltas, reduced))
    before = f"rank {lora.rank} to" if lora.kind == "LoRA" else f"{lora.kind} to rank"
    log.info(f"{before} {rank}: the update changes by {change}")
    if lora.kind == "LoRA":
        return lora._replace(deltas=dict(reduced))
    adapter = {"target_modules": lora.header.get("adapter", {}).get("target_modules")}
    return ExportedLoRA(dict(reduced), {**lora.header, "adapter": adapter}, None)


def with_constant_rank(cfg: DictConfig, lora: ExportedLoRA, model: KnownModel) -> ExportedLoRA:
    """Keep the first components of a T-LoRA, and log its ranks."""
    gate = lora.gate
    assert gate is not None
    with without_network(model.settings) as module:
        size = module.geometry.resolution
        tokens = module.geometry.image_tokens(module.base.latent_size(size, size))
        assert module.sampler.sampling is not None
        sampling = replace(module.sampler.sampling, num_inference_steps=cfg.num_inference_steps)
        timesteps = module.base.sampling_timesteps(tokens, sampling)
    active = gate.schedule.active_ranks(timesteps, timesteps)
    mean, low, high = float(active.float().mean()), gate.schedule.min_rank, gate.schedule.rank
    if cfg.rank is None or cfg.rank > high:
        given = "" if cfg.rank is None else f"rank={cfg.rank}: "
        raise UserError(
            f"{given}this is a T-LoRA, whose rank follows the timestep, and a file for other programs has one. "
            f"Pass rank=N, from {max(low, 1)}, its rank at noise, to {high}, the rank in programs that do not follow "
            f"the schedule; its mean over {cfg.num_inference_steps} sampling steps is {mean:.1f}, which is "
            f"rank={max(round(mean), 1)}"
        )
    log.warning(
        f"note: the rank is {cfg.rank} at every timestep; the T-LoRA's is {low} to {high}, {mean:.1f} on average over "
        f"{len(active)} sampling steps"
    )
    count = cfg.rank * gate.width
    return lora._replace(deltas={n: d.first(count) for n, d in lora.deltas.items() if isinstance(d, LowRank)})


def title(path: Path) -> str:
    """Return a short name of a LoRA file: its own name, or that of its run.

    outputs/snow/lora/last -> snow; outputs/snow/lora/step-000200 -> snow_step-000200; a sweep's job has the sweep's.
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


def percent(share: float) -> str:
    """Format a share to three digits."""
    return f"{100 * share:.3g} %"
