"""T-LoRA's rank mask (arXiv 2507.05964) in a transformer's forwards: hooks that stop components by the timestep."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from datamodules.errors import UserError
from lightning_modules.adapters.formats.find import find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.adapters.rank_schedule import NUM_TRAIN_TIMESTEPS, RankSchedule
from lightning_modules.execution.blocks import with_attribute

NOT_MERGED = "a T-LoRA cannot be merged or fused: its rank follows the timestep, a merged weight does not"
# What opens the gates in training and prediction; a run cannot be without it.
RANK_MASK_CALLBACKS = ("callbacks.rank_schedule.RankMasks",)


class RankGate:
    """Stands behind the down projections of an adapter and stops the components that the timestep does not allow.

    Its mask is there while the transformer's forward runs, a new tensor each time.

    Args:
        schedule: gives the masks.
        width: how many neighbouring rows of the down projection are one component.
    """

    def __init__(self, schedule: RankSchedule, width: int = 1) -> None:
        self.schedule = schedule
        self.width = width
        self.mask: Tensor | None = None
        self.active_ranks: Tensor | None = None  # (B,), of the latest forward

    @property
    def rows(self) -> int:
        """Of the down projection."""
        return self.schedule.rank * self.width

    def attach(self, transformer: nn.Module, adapter_name: str) -> None:
        """Guard an adapter that peft has put into the transformer.

        Raises:
            UserError: the adapter is of another rank, or cannot be masked.
        """
        for name, layer in lora_layers(transformer, adapter_name).items():
            if layer.use_dora.get(adapter_name):
                raise UserError(f"{name} is a DoRA layer: DoRA scales the whole weight, and has no rank to mask")
            if layer.r[adapter_name] != self.rows:
                raise UserError(f"{name} has rank {layer.r[adapter_name]}, the rank schedule is for {self.rows}")
            if adapter_name in layer.merged_adapters:
                raise UserError(f"{name} is fused already; {NOT_MERGED}: unfuse it, or load the pipeline again")
            layer.lora_A[adapter_name].register_forward_hook(self._stop)
        for layer in lora_layers(transformer).values():  # all, so that none is merged before one refuses
            _guard_merging(layer, adapter_name)

    def open(self, timesteps: Tensor, sampling_timesteps: Tensor | None, dtype: torch.dtype) -> None:
        """Set the mask of the forward that comes, for activations of `dtype`; arguments as of `RankSchedule.mask`."""
        mask = self.schedule.mask(timesteps, sampling_timesteps)
        self.active_ranks = mask.sum(dim=1)
        mask = mask if self.width == 1 else mask.repeat_interleave(self.width, dim=1)
        self.mask = mask.to(dtype)

    def _stop(self, down: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """(B, ..., R) -> the same, zero in the components that are masked."""
        mask = self.mask
        if mask is None:
            raise UserError(
                "a T-LoRA layer ran without a rank mask: in diffusers call attach_rank_schedule(pipeline, lora) after "
                "load_lora_weights"
            )
        if mask.shape[0] not in (1, output.shape[0]):
            # Qwen-Image-Edit-2511 modulates with two rows for each sample: the batch at t, then the batch at 0.
            mask = mask.repeat(output.shape[0] // mask.shape[0], 1)
        if output.ndim != 2:
            mask = mask.view(mask.shape[0], *[1] * (output.ndim - 2), mask.shape[1])
        return output * mask.to(output)

    def bind_rank_mask(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """The block with the mask of this moment, whatever runs in between."""
        if torch.compiler.is_compiling():  # where the graph holds the mask
            return block
        return with_attribute(self, "mask", block)


def _guard_merging(layer: Any, adapter_name: str) -> None:
    """Let peft's layer refuse to merge an adapter."""
    merge = layer.merge

    def guarded(safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if adapter_name in (layer.active_adapters if adapter_names is None else adapter_names):
            raise UserError(NOT_MERGED)
        merge(safe_merge=safe_merge, adapter_names=adapter_names)

    layer.merge = guarded


def read_rank_gate(path: Path) -> RankGate | None:
    """The gate that a weights file asks for; None for one that is no T-LoRA of Retouch's.

    Raises:
        UserError: the file asks for what there is not.
    """
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
    current_step: Callable[[], tuple[Tensor, Tensor] | None],
) -> list[RemovableHandle]:
    """Open the gates for each of the transformer's forwards, and close them behind it.

    Args:
        current_step: gives the timestep of the sampling step that runs and (N,) all timesteps of the sampling; None
            outside, where each sample's own is taken from the transformer's arguments.
    """

    signature = inspect.signature(transformer.forward)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Sampling's own: the pipelines round the timestep that they pass to the base's dtype. Where there are gradients
        # it is not sampling, whatever an interrupted pipeline has left behind.
        now = None if torch.is_grad_enabled() else current_step()
        own, dtype = _noise_level(signature.bind(*args, **kwargs).arguments)
        timesteps, all_timesteps = now if now is not None else (own * NUM_TRAIN_TIMESTEPS, None)
        for gate in gates:
            gate.open(timesteps.reshape(-1), all_timesteps, dtype)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for gate in gates:
            gate.mask = None

    return [
        transformer.register_forward_pre_hook(before, with_kwargs=True),
        transformer.register_forward_hook(after, always_call=True),
    ]


def _noise_level(given: Mapping[str, Any]) -> tuple[Tensor, torch.dtype]:
    """Of a forward's arguments: each sample's t (B,), 1 for noise, and the dtype that the transformer computes in."""
    hidden = given["hidden_states"] if "hidden_states" in given else given["x"][0]
    # Z-Image's `t` runs the other way, from noise to the picture.
    t = given["timestep"].float() if "timestep" in given else 1 - given["t"].float()
    autocast = torch.is_autocast_enabled(hidden.device.type)
    return t, torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype


def sampling_step(pipeline: Any) -> tuple[Tensor, Tensor] | None:
    """Where a diffusers pipeline is in its sampling loop, as `mask_forwards` asks."""
    scheduler = pipeline.scheduler
    if hasattr(type(pipeline), "current_timestep"):
        now = getattr(pipeline, "current_timestep", None)  # before the first call it does not exist
        return None if now is None else (now, scheduler.timesteps)
    step = scheduler.begin_index if scheduler.step_index is None else scheduler.step_index
    inside = step is not None and step < len(scheduler.timesteps)
    return (scheduler.timesteps[step], scheduler.timesteps) if inside else None


def attach_rank_schedule(pipeline: Any, lora: str | Path, adapter_name: str | None = None) -> None:
    """Let a T-LoRA that was loaded into a diffusers pipeline follow its rank schedule.

    Args:
        pipeline: of a model that Retouch trains, after `load_lora_weights`.
        lora: the weights that were loaded: a run's folder, a weights folder or a file.
        adapter_name: as given to `load_lora_weights`; None where one adapter is loaded.

    Raises:
        UserError: the file has no schedule, or no such adapter is loaded.
    """
    path = find_or_download(lora)
    gate = read_rank_gate(path)
    if gate is None:
        raise UserError(f"{path} has no rank schedule: it is no T-LoRA, and works without one")
    loaded = list(getattr(pipeline.transformer, "peft_config", {}))
    if adapter_name is None and len(loaded) != 1:
        raise UserError(f"adapter_name: name one of the adapters that are loaded ({', '.join(loaded) or 'none'})")
    if adapter_name is not None and adapter_name not in loaded:
        raise UserError(f"adapter_name={adapter_name}: loaded are {', '.join(loaded) or 'none'}")
    gate.attach(pipeline.transformer, adapter_name or loaded[0])

    def step() -> tuple[Tensor, Tensor] | None:
        now = sampling_step(pipeline)
        if now is None and gate.schedule.kind in ("normalised", "step_index"):
            raise UserError(
                f"rank_schedule={gate.schedule.kind} counts the steps of the {type(pipeline).__name__} that it was "
                "attached to: use that one"
            )
        return now

    mask_forwards(pipeline.transformer, [gate], step)
    if "torch._dynamo" in sys.modules:  # what was compiled before would run on without the masks
        torch.compiler.reset()
