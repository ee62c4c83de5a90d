"""Flow matching, with what can be added to it: weights of places and of t, guidance, preservation."""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from datamodules.batch import LatentBatch, copy_to
from datamodules.errors import UserError
from datamodules.images.framing import Size
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.denoiser import Denoiser
from lightning_modules.estimation.flops import Passes
from lightning_modules.family import Family
from lightning_modules.flow import area_weights, weighted_mean
from lightning_modules.flow_matching import Noised, drop_captions
from lightning_modules.objectives.losses import EditWeight, timestep_weighting
from lightning_modules.objectives.objective import Objective
from lightning_modules.objectives.preservation import Preservation

log = logging.getLogger("retouch")


class FlowMatchingObjective(Objective):
    """The velocity's error, weighed by place and by t; and how far the model has moved where it should not.

    A sample has weighting(t) (sum(w e) / sum(w) + preserve.outside ...) + preserve.weight ..., with the error e of each
    place and its weight w: that of the mask times that of the edit.

    Args:
        loss: the error of each number, by (velocity - target, t).
        mask: `outside`, the weight outside of a sample's mask, where inside it is 1.
        edit_weight: by how much the edit changes a place.
        weighting: of t: None, `cosine`, or the full name of a function.
        contrastive_guidance: the scale s of contrastive guidance, for bases that are distilled from guided ones: the
            target is u + s (target - u), with the model's own velocity u for the empty prompt; 1 for none.
        preserve: what must stay.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        mask: Mapping[str, float],
        edit_weight: EditWeight,
        weighting: str | None,
        contrastive_guidance: float,
        preserve: Preservation,
    ) -> None:
        self.loss = loss
        self.mask_outside = mask["outside"]
        self.edit_weight = edit_weight
        self.weighting = timestep_weighting(weighting)
        self.contrastive_guidance = contrastive_guidance
        self.preserve = preserve
        self.needs_base = preserve.outside > 0 or bool(preserve.prompts)
        self.needs_empty_prompt = contrastive_guidance != 1
        self.compares = "objective.contrastive_guidance" if contrastive_guidance != 1 else ""
        self.preserve_prompts = preserve.prompts

    def check(self, family: Family, adapter: Adapter) -> None:
        super().check(family, adapter)
        if self.edit_weight.floor < 1 and family.condition_images.most == 0:
            raise UserError(
                "objective.edit_weight weighs what differs from the picture that is edited, and "
                f"{family.pipeline_name} sees none: use masks"
            )

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        if any("rejected" in beside for _, beside in sizes):
            log.info("note: samples have rejected pictures, which objective=dpo learns from; here they are unused")
        region_is_known = any(controls or "mask" in beside for (_, *controls), beside in sizes)
        if self.preserve.outside and sizes and not region_is_known:
            raise UserError(
                f"objective.preserve.outside={self.preserve.outside:g} is about what is outside of a mask or an edit, "
                "and no sample has a mask or a picture that is edited: leave it out, or add masks"
            )

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        target = self._target(batch, noised, model)  # before what is kept for the backward pass
        velocity = model(noised.x_t, noised.t, noised.controls, noised.prompt)
        error = self.loss(velocity.float() - target, noised.t).mean(dim=1, keepdim=True)
        losses = weighted_mean(error, self._weights(batch, noised, error))
        if self.preserve.outside:
            losses = losses + self.preserve.outside_losses(velocity, self._region(batch, noised, error), noised, model)
        if self.weighting is not None:
            losses = losses * self.weighting(noised.t)
        if self.preserve.looks_at_prompts(step):
            losses = losses + self.preserve.prompt_losses(batch, noised, model)
        return losses if batch.weights is None else losses * batch.weights

    def _target(self, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        """The velocity to learn."""
        if self.contrastive_guidance == 1:
            return noised.velocity
        empty = drop_captions(batch, torch.ones_like(noised.dropped))
        with torch.no_grad():
            unguided = model(noised.x_t, noised.t, noised.controls, empty).float()
        # A sample that is shown without its caption is what others are guided away from.
        scale = torch.where(noised.dropped, 1.0, self.contrastive_guidance)
        return unguided + copy_to(scale, unguided.device).view(-1, 1, 1, 1) * (noised.velocity - unguided)

    def _weights(self, batch: LatentBatch, noised: Noised, error: Tensor) -> Tensor | None:
        """Of each place (B, 1, h, w), as `error` is; None where all count alike."""
        weights = None
        if batch.mask is not None:
            weights = self.mask_outside + (1 - self.mask_outside) * area_weights(batch.mask, error)
        if self.edit_weight.floor < 1 and noised.controls:
            by_edit = self.edit_weight(noised.mean, noised.controls[0])
            weights = by_edit if weights is None else weights * by_edit
        return weights

    def _region(self, batch: LatentBatch, noised: Noised, error: Tensor) -> Tensor:
        """What the edit is about, (B, 1, h, w) from 0 to 1: the mask, or what changes; all where neither is known."""
        if batch.mask is not None:
            return area_weights(batch.mask, error)
        if noised.controls:
            return self.edit_weight.region(noised.mean, noised.controls[0])
        return torch.ones_like(error)

    def passes(self, step: int) -> Passes:
        prompts = self.preserve.looks_at_prompts(step)
        return Passes(1 + prompts, prompts + (self.contrastive_guidance != 1) + (self.preserve.outside > 0))

    def describe(self) -> str:
        extra = []
        if self.contrastive_guidance != 1:
            extra.append("a forward without gradient for contrastive guidance")
        if self.preserve.outside:
            extra.append("a forward of the base for what is outside of the edit")
        if self.preserve.prompts:
            often = "" if self.preserve.every == 1 else f" in one of {self.preserve.every} steps"
            extra.append(f"a forward of the base, and a forward and backward more, for preserve.prompts{often}")
        return "; ".join(extra)
