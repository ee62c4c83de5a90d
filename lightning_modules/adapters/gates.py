"""T-LoRA's rank mask (arXiv 2507.05964) in a transformer's forwards: a gate that closes components by the timestep."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foundation.errors import UserError
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.adapters.rank_schedule import NUM_TRAIN_TIMESTEPS, RankSchedule
from lightning_modules.lora_files.reading import LoRAFile, find_or_download

NOT_MERGED = "a T-LoRA cannot be merged or fused: its rank follows the timestep, a merged weight does not"
# The timestep of a sampling step, and all timesteps (N,) of the sampling; None for the latter outside of a sampling.
Timesteps = tuple[Tensor, Tensor | None]


class Gate:
    """Multiplies the outputs of an adapter's down projections by factors of each sample, while there are some.

    Attributes:
        factors: (B, R), or (B, 1) for all components alike; set while the transformer's forward runs.
    """

    def __init__(self) -> None:
        self.factors: Tensor | None = None

    def attach(self, transformer: nn.Module, adapter_name: str) -> None:
        """Register the hooks. They stay: compiled blocks keep the hooks of their first forward."""
        for layer in lora_layers(transformer, adapter_name).values():
            layer.lora_A[adapter_name].register_forward_hook(self._multiply)

    @contextmanager
    def using(self, factors: Tensor) -> Iterator[None]:
        """Temporarily multiply by these factors."""
        self.factors = factors
        try:
            yield
        finally:
            self.factors = None

    def closed(self, output: Tensor) -> Tensor:
        """Return a layer's output where there are no factors."""
        return output

    def _multiply(self, down: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """(B, ..., R) -> (B, ..., R)."""
        factors = self.factors
        if factors is None:
            return self.closed(output)
        if factors.shape[0] not in (1, output.shape[0]):
            # Qwen-Image-Edit-2511 modulates with two rows for each sample: the batch at t, then the batch at 0.
            factors = factors.repeat(output.shape[0] // factors.shape[0], 1)
        if output.ndim != 2:
            factors = factors.view(factors.shape[0], *[1] * (output.ndim - 2), factors.shape[1])
        return output * factors.to(output)


class RankGate(Gate):
    """Masks the components of an adapter that are inactive at a timestep.

    Args:
        schedule: yields the masks.
        width: neighbouring rows of the down projection that are one component.

    Attributes:
        active_ranks: (B,), of the latest forward.
    """

    def __init__(self, schedule: RankSchedule, width: int = 1) -> None:
        super().__init__()
        self.schedule = schedule
        self.width = width
        self.active_ranks: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the down projection."""
        return self.schedule.rank * self.width

    def attach(self, transformer: nn.Module, adapter_name: str) -> None:
        """Guard an adapter that peft has put into the transformer; raises UserError if it cannot be masked."""
        for name, layer in lora_layers(transformer, adapter_name).items():
            if layer.use_dora.get(adapter_name):
                raise UserError(f"{name} is a DoRA layer: DoRA scales the whole weight, and has no rank to mask")
            if layer.r[adapter_name] != self.rows:
                raise UserError(f"{name} has rank {layer.r[adapter_name]}, the rank schedule is for {self.rows}")
            if adapter_name in layer.merged_adapters:
                raise UserError(f"{name} is fused already; {NOT_MERGED}: unfuse it, or load the pipeline again")
        super().attach(transformer, adapter_name)
        for layer in lora_layers(transformer).values():  # all, so that none is merged before one refuses
            _guard_merging(layer, adapter_name)

    def open(self, timesteps: Tensor, sampling_timesteps: Tensor | None, dtype: torch.dtype) -> None:
        """Set the mask of the next forward, for activations of `dtype`; arguments as for `RankSchedule.mask`."""
        mask = self.schedule.mask(timesteps.reshape(-1), sampling_timesteps)
        self.active_ranks = mask.sum(dim=1)
        mask = mask if self.width == 1 else mask.repeat_interleave(self.width, dim=1)
        self.factors = mask.to(dtype)

    def closed(self, output: Tensor) -> Tensor:
        raise UserError(
            "a T-LoRA layer ran without a rank mask: in diffusers call attach_rank_schedule(pipeline, lora) after "
            "load_lora_weights"
        )


def _guard_merging(layer: Any, adapter_name: str) -> None:
    merge = layer.merge

    def guarded(safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if adapter_name in (layer.active_adapters if adapter_names is None else adapter_names):
            raise UserError(NOT_MERGED)
        merge(safe_merge=safe_merge, adapter_names=adapter_names)

    layer.merge = guarded


def read_rank_gate(path: Path) -> RankGate | None:
    """Return the gate that a weights file asks for; None for a file that is not a T-LoRA of Retouch."""
    wanted = LoRAFile(path).adapter.get("rank_schedule")
    if wanted is None:
        return None
    try:
        schedule = RankSchedule(*(wanted[name] for name in ("kind", "rank", "min_rank", "alpha_rank_scale")))
        return RankGate(schedule, int(wanted["width"]))
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{path} has a rank schedule that this version of Retouch does not know: {error}") from error


def mask_forwards(
    transformer: nn.Module,
    gates: Sequence[RankGate],
    timesteps: Callable[[tuple[Any, ...], dict[str, Any]], Timesteps | None],
) -> list[RemovableHandle]:
    """Open the gates for each of the transformer's forwards in a sampling, and close them after it; return the hooks.

    Args:
        timesteps: from a forward's arguments; None leaves the gates as they are.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (now := timesteps(args, kwargs)) is not None:
            for gate in gates:
                gate.open(*now, torch.bool)

    def after(*_: Any) -> None:
        for gate in gates:
            gate.factors = None

    if not gates:
        return []
    return [
        transformer.register_forward_pre_hook(before, with_kwargs=True),
        transformer.register_forward_hook(after, always_call=True),
    ]


def sampling_step(pipeline: Any) -> tuple[Tensor, Tensor] | None:
    """Return the current timestep of a diffusers pipeline's sampling loop and all its timesteps; None outside."""
    scheduler = pipeline.scheduler
    if hasattr(type(pipeline), "current_timestep"):
        now = getattr(pipeline, "current_timestep", None)  # before the first call it does not exist
        return None if now is None else (now, scheduler.timesteps)
    step = scheduler.begin_index if scheduler.step_index is None else scheduler.step_index
    inside = step is not None and step < len(scheduler.timesteps)
    return (scheduler.timesteps[step], scheduler.timesteps) if inside else None


def attach_rank_schedule(pipeline: Any, lora: str | Path, adapter_name: str | None = None) -> None:
    """Make a T-LoRA that was loaded into a diffusers pipeline follow its rank schedule.

    Args:
        pipeline: a pipeline of a model that Retouch trains, after `load_lora_weights`.
        lora: the loaded weights: a run's folder, a weights folder or a file.
        adapter_name: as passed to `load_lora_weights`; None if only one adapter is loaded.
    """
    path, transformer = find_or_download(lora), pipeline.transformer
    gate = read_rank_gate(path)
    if gate is None:
        raise UserError(f"{path} has no rank schedule: it is not a T-LoRA, and works without one")
    loaded = list(getattr(transformer, "peft_config", {}))
    name = loaded[0] if adapter_name is None and len(loaded) == 1 else adapter_name
    if name is None or name not in loaded:
        raise UserError(f"adapter_name={name}: name one of the adapters that are loaded, {', '.join(loaded) or 'none'}")
    gate.attach(transformer, name)
    signature = inspect.signature(transformer.forward)

    def timesteps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timesteps:
        # The pipelines round the timestep that they pass to the base's dtype: their own is exact. With gradients it is
        # not sampling, whatever an interrupted pipeline has left.
        now = None if torch.is_grad_enabled() else sampling_step(pipeline)
        if now is not None:
            return now
        if gate.schedule.kind in ("normalised", "step_index"):
            raise UserError(
                f"rank_schedule={gate.schedule.kind} counts the steps of the {type(pipeline).__name__} that it was "
                "attached to: use that one"
            )
        given = signature.bind(*args, **kwargs).arguments
        # Z-Image's `t` runs from noise to the image.
        t = given["timestep"].float() if "timestep" in given else 1 - given["t"].float()
        return t * NUM_TRAIN_TIMESTEPS, None

    mask_forwards(transformer, [gate], timesteps)
    if "torch._dynamo" in sys.modules:  # what was compiled before would run on without the masks
        torch.compiler.reset()
