"""What must stay: the base's own output as the target, no pictures needed."""

from collections.abc import Sequence

from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from lightning_modules.denoiser import Denoiser
from lightning_modules.flow import flow_loss
from lightning_modules.flow_matching import Noised


class Preservation:
    """Keeps the trained model near its base where an edit has nothing to say.

    Args:
        outside: weight of the distance from the base's velocity outside of the mask, or of a sample without one outside
            of what the edit changes; the mean over all places, so that an edit of the whole picture keeps nothing.
        prompts: others than the samples' own, for which the model is to do what the base does; "" is the empty one.
        weight: of the distance from the base's velocity for these.
        every: optimizer steps between two that look at `prompts`.
    """

    def __init__(self, outside: float, prompts: Sequence[str], weight: float, every: int) -> None:
        if isinstance(prompts, str):
            raise UserError(f'objective.preserve.prompts={prompts}: a list, as ["{prompts}"]')
        self.outside = outside
        self.prompts = tuple(prompts) if weight else ()
        self.weight = weight
        self.every = every

    def looks_at_prompts(self, step: int) -> bool:
        """Whether this optimizer step does."""
        return bool(self.prompts) and step % self.every == 0

    def outside_losses(self, velocity: Tensor, region: Tensor, noised: Noised, model: Denoiser) -> Tensor:
        """(B,), weighted: how far the velocity is from the base's outside of a region (B, 1, h, w) from 0 to 1."""
        base = model.base(noised.x_t, noised.t, noised.controls, noised.prompt)
        error = (velocity.float() - base.float()).square().mean(dim=1, keepdim=True)
        return self.outside * (error * (1 - region)).mean(dim=(1, 2, 3))

    def prompt_losses(self, batch: LatentBatch, noised: Noised, model: Denoiser) -> Tensor:
        """(B,), weighted: how far the velocity is from the base's for each sample's other prompt.

        The picture is the one that is edited, where it is as large as the target: a prompt that the adapter does not
        know should leave it as the base would; else it is the target.
        """
        x0 = noised.x0
        if noised.controls and noised.controls[0].shape == x0.shape:
            x0 = noised.controls[0]
        asked = noised.x_t_of(x0), noised.t, noised.controls, batch.preserve_prompt
        base = model.base(*asked)
        return self.weight * flow_loss(model(*asked), base)
