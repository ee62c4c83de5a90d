"""A module's training losses, as its training step takes them."""

from torch import Tensor

from datamodules.batch import LatentBatch
from lightning_modules.edit_module import EditModule


def losses(module: EditModule, batch: LatentBatch) -> Tensor:
    """Of each sample (B,), at the timesteps and with the noise of its draw."""
    shift = module.base.dynamic_shift(module.geometry.tokens(batch).target)
    return module.objective.losses(batch, shift, module.normalize, module.denoise)
