"""Preferences: learn the better of two results for one instruction."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.images.resizing import Size
from datamodules.images.samples import Sample
from foundation.errors import UserError, listing
from lightning_modules.denoiser import Denoiser
from lightning_modules.flow import Noised, area_weights, mean_over_positions
from lightning_modules.objectives.objective import Objective, Passes


def _require_rejected(keys: list[str]) -> None:
    if keys:
        raise UserError(
            f"objective=dpo learns from pairs of a target and a rejected image, which {listing(keys)} lack. Add "
            "rejected_images/X.png next to training_images/X.png, or a column `rejected` (docs/data.md)."
        )


class PreferenceObjective(Objective):
    """Direct preference optimization of velocities (arXiv 2311.12908; for rectified flow 2501.13918).

    The loss is -log sigmoid(-beta / 2 ((e_w - e0_w) - (e_l - e0_l))). e is the velocity's mean squared error over the
    latent, weighted by the mask if there is one, for the target w and the rejected image l, at the same t with the same
    noise; e0 is the error of the base. It is log 2 if the model prefers neither more than the base does, and less if it
    prefers the target.

    Args:
        beta: strength of the tie to the base: the larger, the smaller the difference in errors that suffices.
    """

    name = "dpo"
    needs_base = True
    compares = "objective=dpo"

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def check_samples(self, samples: Sequence[Sample]) -> None:
        _require_rejected([sample.key for sample in samples if sample.rejected is None])

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        _require_rejected(["some samples"] * any("rejected" not in names for _, names in sizes))

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        assert noised.rejected is not None
        target, rejected = (self._gain(batch, noised._replace(x0=x0), model) for x0 in (noised.x0, noised.rejected))
        losses = -F.logsigmoid(-self.beta / 2 * (target - rejected))
        return losses if batch.weights is None else losses * batch.weights

    def _gain(self, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        """Return the difference of the model's error from the base's, (B,)."""
        inputs = noised.inputs
        velocity, base = model(*inputs).float(), model.base(*inputs).float()
        # (v - u)^2 - (v0 - u)^2 as a product: the difference would cancel, and leave rounding to multiply by beta.
        gain = (velocity - base) * (velocity + base - 2 * noised.velocity)
        gain = gain.mean(dim=1, keepdim=True)
        return mean_over_positions(gain, None if batch.mask is None else area_weights(batch.mask, gain))

    def passes(self, step: int) -> Passes:
        return Passes(training=2, forward=2)
