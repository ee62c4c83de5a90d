"""A module's training losses, as its training step takes them."""

from torch import Tensor

from datamodules.batch import LatentBatch
from lightning_modules.edit_module import EditModule


def losses(module: EditModule, batch: LatentBatch) -> Tensor:
    """Return the loss of each sample (B,) at the timestep and with the noise of its draw."""
    shift = module.base.dynamic_shift(module.geometry.tokens(batch).target)
    noised = module.flow.noised(batch, shift, module.normalize)
    return module.objective.losses(batch, noised, module.denoise, module.global_step)


# Every part of the objective.
EVERYTHING = [
    "objective/loss=pseudo_huber",
    "objective.mask.outside=0.3",
    "objective.edit_weight.floor=0.2",
    "objective.weighting=cosine",
    "objective.contrastive_guidance=2.5",
    "objective.preserve.outside=0.7",
    'objective.preserve.prompts=["", "keep it"]',
    "objective.preserve.weight=0.4",
]
