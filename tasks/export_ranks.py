"""Other ranks for task=export: the closest LoRA of a rank, and a T-LoRA at one rank."""

from collections.abc import Mapping
from dataclasses import replace

from omegaconf import DictConfig

from datamodules.errors import UserError
from lightning_modules.adapters.constant_rank import ActiveRanks
from lightning_modules.adapters.low_rank import LowRank, relative_change
from tasks.export_table import most_in, percent
from tasks.loras_read import LoRA, ReadLoRA, alone
from tasks.models import KnownModel, without_network
from tasks.terminal import log


def with_rank(lora: LoRA, rank: int | None) -> LoRA:
    """The closest LoRA of this rank; says how close that is."""
    if rank is None:
        return lora
    if lora.is_dora:
        raise UserError(f"rank={rank}: this is a DoRA, which scales whole rows of weights: it keeps its rank")
    header, kind = dict(lora.header), lora.kind
    if kind != "LoRA":
        header["adapter"] = {"target_modules": header.get("adapter", {}).get("target_modules")}
        lora = lora._replace(header=header, scale=None)
    reduced = lora._replace(updates={name: update.reduced(rank) for name, update in lora.updates.items()})
    if kind == "LoRA" and lora.rank <= rank:
        log.info(f"rank={rank}: no layer has a higher one, all stay as they are")
        return reduced
    errors = {name: relative_change({name: one}, {name: reduced.updates[name]}) for name, one in lora.updates.items()}
    change = percent(relative_change(lora.updates, reduced.updates))
    before = f"rank {lora.rank} to" if kind == "LoRA" else f"{kind} to rank"
    log.info(f"{before} {rank}: the update changes by {change}, {most_in(errors)}")
    return reduced


def with_constant_rank(cfg: DictConfig, one: ReadLoRA, model: KnownModel) -> tuple[LoRA, str]:
    """The first components of a T-LoRA, and what is to be said of that."""
    gate = one.gate
    assert gate is not None
    with without_network(model.settings) as module:
        side = module.geometry.resolution
        tokens = module.geometry.image_tokens(module.base.latent_size(side, side))
        assert module.sampler.sampling is not None
        sampling = replace(module.sampler.sampling, num_inference_steps=cfg.num_inference_steps)
        ranks = ActiveRanks.of(gate, module.base.sampling_timesteps(tokens, sampling))
    schedule = gate.schedule
    if cfg.rank is None or cfg.rank > schedule.rank:
        given = "" if cfg.rank is None else f"rank={cfg.rank}: "
        raise UserError(
            f"{given}{one.path} is a T-LoRA, whose rank follows the timestep, and a file for other programs has one: "
            f"pass rank=N, from {max(schedule.min_rank, 1)}, its rank at noise, to {schedule.rank}, what programs use "
            f"that do not follow the schedule; its mean over {cfg.num_inference_steps} sampling steps is "
            f"{ranks.mean:.1f}, which is rank={max(round(ranks.mean), 1)}"
        )
    lora = alone(one)
    updates = {name: update for name, update in lora.updates.items() if isinstance(update, LowRank)}
    return lora._replace(updates=dict(ranks.first(updates, cfg.rank))), _what_is_lost(cfg, ranks, updates)


def _what_is_lost(cfg: DictConfig, ranks: ActiveRanks, updates: Mapping[str, LowRank]) -> str:
    """Where the rank no longer follows the timestep."""
    schedule = ranks.gate.schedule
    return (
        f"note: the rank is {cfg.rank} at every timestep, the T-LoRA's {schedule.min_rank} to {schedule.rank}, "
        f"{ranks.mean:.1f} on average over {len(ranks.ranks)} sampling steps. The update of the weights is "
        f"{percent(ranks.difference(updates, cfg.rank))} of its norm away in a step, on average."
    )
