"""Flow matching with its options: weights of positions, contrastive guidance, preservation of the base."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.batch import LatentBatch, copy_to
from datamodules.images.resizing import Size, has_edits
from foundation.errors import UserError
from lightning_modules.denoiser import Denoiser
from lightning_modules.flow import Noised, area_weights, flow_loss, mean_over_positions
from lightning_modules.objectives.objective import Objective, Passes

log = logging.getLogger("retouch")


def squared_error(difference: Tensor, t: Tensor) -> Tensor:
    """(B, C, h, w), (B,) -> (B, C, h, w)."""
    return difference.square()


@dataclass(frozen=True)
class Huber:
    """Quadratic below a threshold and linear above it, so that outliers count less; small errors count as squares.

    Args:
        delta: the threshold; for `exponential` at t = 1.
        schedule: `constant`; or `exponential`, delta ** t: 1 at t = 0, where x_t contains no noise to predict and
            errors are large (kohya-ss/sd-scripts, huber_schedule).
    """

    delta: float
    schedule: Literal["constant", "exponential"]

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "exponential"):
            raise UserError(f"objective.loss.schedule={self.schedule}: choose constant or exponential")

    def threshold(self, t: Tensor) -> Tensor:
        """(B,) -> (B, 1, 1, 1)."""
        t = torch.ones_like(t) if self.schedule == "constant" else t
        return torch.exp(t * math.log(self.delta)).view(-1, 1, 1, 1)

    def __call__(self, difference: Tensor, t: Tensor) -> Tensor:
        """(B, C, h, w), (B,) -> (B, C, h, w)."""
        delta, size = self.threshold(t), difference.abs()
        return torch.where(size <= delta, size.square(), delta * (2 * size - delta))


# Side of the square of latent positions over which changes are averaged; odd, to have a centre.
SMOOTH = 3


def edit_region(target: Tensor, control: Tensor) -> Tensor:
    """Return each position's change relative to the sample's largest, (B, 1, h, w); 0 if nothing changes.

    Args:
        target: (B, C, h, w) normalized latents.
        control: latents of the edited image; if its size differs, both are compared at the smaller one.
    """
    size = target.shape[-2:]
    if control.shape[-2:] != size:
        grid = [min(sides) for sides in zip(size, control.shape[-2:], strict=True)]
        target, control = (F.interpolate(one, size=grid, mode="area") for one in (target, control))
    change = (target - control).square().mean(dim=1, keepdim=True)
    change = F.avg_pool2d(change, SMOOTH, 1, SMOOTH // 2, count_include_pad=False).sqrt()
    if change.shape[-2:] != size:
        change = F.interpolate(change, size=size, mode="bilinear", align_corners=False)
    return change / change.amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)


@dataclass
class Preservation:
    """Keeps the trained model near its base, whose own velocity is the target: no images are needed.

    Args:
        outside: weight of the distance outside of the mask; without a mask, outside of the edited region. It is the
            mean over all positions, so that an edit of the whole image preserves nothing.
        prompts: further prompts, for which the model should behave as its base; "" is the empty prompt.
        weight: weight of the distance for these prompts.
        every: optimizer steps from one use of `prompts` to the next.
    """

    outside: float
    prompts: Sequence[str]
    weight: float
    every: int

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str):
            raise UserError(f'objective.preserve.prompts={self.prompts}: pass a list, as ["{self.prompts}"]')
        self.prompts = tuple(self.prompts) if self.weight else ()

    def uses_prompts(self, step: int) -> bool:
        """Return whether this optimizer step has a loss for the prompts."""
        return bool(self.prompts) and step % self.every == 0

    def outside_losses(self, velocity: Tensor, region: Tensor, noised: Noised, model: Denoiser) -> Tensor:
        """Return the weighted distance from the base (B,) outside of a region (B, 1, h, w) from 0 to 1."""
        base = model.base(*noised.inputs)
        error = (velocity.float() - base.float()).square().mean(dim=1, keepdim=True)
        return self.outside * (error * (1 - region)).mean(dim=(1, 2, 3))

    def prompt_losses(self, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        """Return the weighted distance from the base (B,) for each sample's further prompt.

        The image is the edited one if it has the target's size, since a prompt that the adapter does not know should
        leave it as the base does; else it is the target.
        """
        x0 = noised.x0
        if noised.edited is not None and noised.edited.shape == x0.shape:
            x0 = noised.edited
        inputs = noised._replace(x0=x0, prompt=batch.preserve_prompt).inputs
        base = model.base(*inputs)
        return self.weight * flow_loss(model(*inputs), base)


class FlowMatchingObjective(Objective):
    """The velocity's error, weighted by position, plus distances from the base.

    The loss is sum(w e) / sum(w) + preserve.outside ... + preserve.weight ..., with the error e of each position, and
    its weight w, the mask's times the edit's.

    Args:
        loss: element-wise error, from (velocity - target, t).
        mask: `outside`, the weight outside of a sample's mask; inside it is 1.
        edit_weight: `floor`, the weight where the edit changes nothing; the most changed position has weight 1, so that
            a small edit of a large image is not drowned. 1: no weights.
        contrastive_guidance: the scale s for guidance-distilled bases: the target is u + s (target - u), with the
            model's own velocity u for the empty prompt; 1 for none.
        preserve: distances from the base.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        mask: Mapping[str, float],
        edit_weight: Mapping[str, float],
        contrastive_guidance: float,
        preserve: Preservation,
    ) -> None:
        self.loss = loss
        self.mask_outside = mask["outside"]
        self.edit_floor = edit_weight["floor"]
        self.contrastive_guidance = contrastive_guidance
        self.preserve = preserve
        self.needs_base = preserve.outside > 0 or bool(preserve.prompts)
        self.needs_empty_prompt = contrastive_guidance != 1
        self.compares = "objective.contrastive_guidance" if contrastive_guidance != 1 else ""
        self.preserve_prompts = tuple(preserve.prompts)

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        if any("rejected" in names for _, names in sizes):
            log.info("note: samples have rejected images, which objective=dpo learns from; here they are unused")
        edits = has_edits(sizes)
        if self.edit_floor < 1 and sizes and not edits:
            raise UserError(
                f"objective.edit_weight.floor={self.edit_floor:g} weights differences from the edited image, and no "
                "sample has one. Use masks."
            )
        region_is_known = edits or any("mask" in names for _, names in sizes)
        if self.preserve.outside and sizes and not region_is_known:
            raise UserError(
                f"objective.preserve.outside={self.preserve.outside:g} preserves the outside of a mask or an edit, and "
                "no sample has a mask or a control image. Leave it out, or add masks."
            )

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        target = self._target(batch, noised, model)  # before activations are kept for the backward pass
        velocity = model(*noised.inputs)
        error = self.loss(velocity.float() - target, noised.t).mean(dim=1, keepdim=True)
        losses = mean_over_positions(error, self._weights(batch, noised, error))
        if self.preserve.outside:
            losses = losses + self.preserve.outside_losses(velocity, self._region(batch, noised, error), noised, model)
        if self.preserve.uses_prompts(step):
            losses = losses + self.preserve.prompt_losses(batch, noised, model)
        return losses if batch.weights is None else losses * batch.weights

    def _target(self, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        if self.contrastive_guidance == 1:
            return noised.velocity
        samples = len(batch.keys)
        empty = {name: one.expand(samples, *one.shape[1:]) for name, one in batch.empty_prompt.items()}
        with torch.no_grad():
            unguided = model(*noised._replace(prompt=empty).inputs).float()
        # A sample whose caption is dropped teaches the velocity that others are guided away from.
        scale = torch.tensor(
            [1.0 if dropped else self.contrastive_guidance for dropped in batch.dropped or [False] * samples]
        )
        return unguided + copy_to(scale, unguided.device).view(-1, 1, 1, 1) * (noised.velocity - unguided)

    def _weights(self, batch: LatentBatch, noised: Noised, error: Tensor) -> Tensor | None:
        """Return the weight of each position (B, 1, h, w), as `error`; None if all are equal."""
        weights = None
        if batch.mask is not None:
            weights = self.mask_outside + (1 - self.mask_outside) * area_weights(batch.mask, error)
        if self.edit_floor < 1 and noised.edited is not None:
            by_edit = self.edit_floor + (1 - self.edit_floor) * edit_region(noised.mean, noised.edited)
            weights = by_edit if weights is None else weights * by_edit
        return weights

    def _region(self, batch: LatentBatch, noised: Noised, error: Tensor) -> Tensor:
        """Return the region of the edit, (B, 1, h, w) from 0 to 1: the mask, or the changes; else everything."""
        if batch.mask is not None:
            return area_weights(batch.mask, error)
        if noised.edited is not None:
            return edit_region(noised.mean, noised.edited)
        return torch.ones_like(error)

    def passes(self, step: int) -> Passes:
        prompts = self.preserve.uses_prompts(step)
        return Passes(1 + prompts, prompts + (self.contrastive_guidance != 1) + (self.preserve.outside > 0))
