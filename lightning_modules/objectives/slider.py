"""Pair sliders: a direction learned from pairs, so that the strength of the LoRA is a dial."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.batch import LatentBatch, copy_to
from datamodules.images.resizing import Size
from datamodules.images.samples import Sample
from foundation.errors import UserError
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.denoiser import Denoiser
from lightning_modules.family import Family
from lightning_modules.flow import Noised, mix
from lightning_modules.objectives.flow_matching import FlowMatchingObjective

# Separates a draw's direction from the rest of its randomness.
DIRECTION = 0x736C6964


class SliderObjective(FlowMatchingObjective):
    """Half of the draws learn control -> target at LoRA scale 1, the others target -> control at scale -1.

    Args:
        seed: seed of the directions.
        flow_matching: arguments of `FlowMatchingObjective`.
    """

    name = "slider"
    scales = (-2, -1, 0, 1, 2)

    def __init__(self, seed: int, **flow_matching: Any) -> None:
        super().__init__(**flow_matching)
        self.seed = seed

    def check_model(self, family: Family, adapter: Adapter) -> None:
        super().check_model(family, adapter)
        if not adapter.is_linear:
            raise UserError(
                f"objective=slider needs an adapter whose update can be negated; {adapter} cannot be. Use "
                "adapter=lora, tlora or ortho_tlora."
            )
        images = family.condition_images
        if images.most == 0:
            raise UserError(f"objective=slider learns from pairs, and {family.pipeline_name} takes no image to edit")
        if images.text_sees_them:
            raise UserError(
                "objective=slider exchanges control and target, and the text encoder of "
                f"{family.pipeline_name} has seen the control. Choose a model whose text encoder sees no images, as "
                "flux_kontext or flux2_klein_4b."
            )

    def check_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            _require_one(len(sample.controls), sample.key)

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        super().check_sizes(sizes)
        for (target, *controls), _ in sizes:
            size, *others = ("x".join(map(str, one)) for one in (target, *controls))
            _require_one(len(controls), f"a sample of {size}")
            if controls[0] != target:
                raise UserError(
                    f"objective=slider exchanges control and target, and a sample's are {others[0]} and {size}. Use "
                    "one size for both; data.buckets=aspect crops pairs of similar proportions so."
                )

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        sign = copy_to(self.signs(batch.draws), noised.x0.device)
        with model.turned(sign):
            return super().losses(batch, exchanged(noised, sign), model, step)

    def signs(self, draws: Sequence[int]) -> Tensor:
        """Return the direction of each draw (B,), 1 or -1: a function of the seed and the draw."""
        generators = (torch.Generator().manual_seed(mix(mix(self.seed, draw), DIRECTION)) for draw in draws)
        return torch.stack([1.0 - 2 * torch.randint(2, (), generator=one) for one in generators])


def exchanged(noised: Noised, sign: Tensor) -> Noised:
    """Exchange control and target where the sign (B,) is negative."""
    backwards = sign.view(-1, 1, 1, 1) < 0
    [control] = noised.controls
    edited = torch.where(backwards, noised.mean, control)
    return noised._replace(
        x0=torch.where(backwards, control, noised.x0),
        mean=torch.where(backwards, control, noised.mean),
        controls=[edited],
        edited=edited,
    )


def _require_one(controls: int, sample: str) -> None:
    if controls != 1:
        raise UserError(f"objective=slider needs one condition image for each target, and {sample} has {controls}")
