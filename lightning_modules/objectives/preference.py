"""Preferences: of two results for one instruction the one that is liked more."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.errors import UserError, listing
from datamodules.images.framing import Size
from datamodules.images.samples import Sample
from lightning_modules.denoiser import Denoiser
from lightning_modules.estimation.flops import Passes
from lightning_modules.flow import area_weights, velocity_target, weighted_mean
from lightning_modules.flow_matching import Noised
from lightning_modules.objectives.objective import Objective

NEEDED = "objective=dpo learns from pairs of a target and a rejected picture"
REMEDY = "add rejected_images/X.png beside training_images/X.png, or a column `rejected` (docs/data.md)"


class PreferenceObjective(Objective):
    """Direct preference optimization of velocities (arXiv 2311.12908; for rectified flow 2501.13918).

    A sample has -log sigmoid(-beta / 2 ((e_w - e0_w) - (e_l - e0_l))): e is the velocity's mean squared error over the
    latent's numbers, weighed by the mask where there is one; of w, the target, and of l, the rejected picture, at one t
    with one noise; e0 is that of the base, the adapter off. It is log 2 where the model prefers neither more than the
    base does, and less where it prefers the target.

    Args:
        beta: how strictly it stays near the base: the larger, the sooner a difference in errors is enough.
    """

    name = "dpo"
    needs_base = True
    compares = "objective=dpo"

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def check_samples(self, samples: Sequence[Sample]) -> None:
        if without := [sample.key for sample in samples if sample.rejected is None]:
            raise UserError(f"{NEEDED}, and {listing(without)} have no rejected one: {REMEDY}")

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        if any("rejected" not in beside for _, beside in sizes):
            raise UserError(f"{NEEDED}, and some samples have no rejected one: {REMEDY}")

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        if noised.rejected is None:  # of a stream it is not known before
            raise UserError(f"{NEEDED}, and {batch.keys[0]} has no rejected one: {REMEDY}")
        target, rejected = (self._gain(x0, batch, noised, model) for x0 in (noised.x0, noised.rejected))
        losses = -F.logsigmoid(-self.beta / 2 * (target - rejected))
        return losses if batch.weights is None else losses * batch.weights

    def _gain(self, x0: Tensor, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        """(B,): by how much the error for x0 is above the base's."""
        asked = noised.x_t_of(x0), noised.t, noised.controls, noised.prompt
        velocity, base = model(*asked).float(), model.base(*asked).float()
        # (v - u)^2 - (v0 - u)^2 as a product: the difference would cancel, and beta times what is left is rounding.
        gain = (velocity - base) * (velocity + base - 2 * velocity_target(x0, noised.eps))
        gain = gain.mean(dim=1, keepdim=True)
        return weighted_mean(gain, None if batch.mask is None else area_weights(batch.mask, gain))

    def passes(self, step: int) -> Passes:
        return Passes(training=2, forward=2)

    def describe(self) -> str:
        return "another for the rejected picture, and for both a forward of the base"
