"""The interface of objectives, which training steps minimize."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.images.resizing import Size
from datamodules.images.samples import Sample
from foundation.errors import UserError
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.denoiser import Denoiser
from lightning_modules.family import Family
from lightning_modules.flow import Noised


class Passes(NamedTuple):
    """Passes of a sample through the transformer in a step.

    Attributes:
        training: forward and backward; the activations of all are in memory together.
        forward: without gradient.
    """

    training: int = 1
    forward: int = 0


ONE = Passes()


class Objective:
    """A loss of each sample.

    Attributes:
        name: as recorded in a LoRA's file.
        scales: LoRA scales at which sample images show the result.
        needs_base: whether it uses the base's velocity.
        compares: the setting that compares two predictions of the model, for which dropout would differ; else empty.
        needs_empty_prompt: whether batches must contain the empty prompt's conditioning.
        preserve_prompts: further prompts; `LatentBatch.preserve_prompt` holds one of them for each sample.
    """

    name: str = "flow_matching"
    scales: tuple[int, ...] = (1,)
    needs_base: bool = False
    compares: str = ""
    needs_empty_prompt: bool = False
    preserve_prompts: tuple[str, ...] = ()

    @property
    def chosen(self) -> str:
        """The name to show in summaries; empty for the default objective."""
        return "" if self.name == Objective.name else self.name

    def check_model(self, family: Family, adapter: Adapter) -> None:
        """Raise a UserError for a model or an adapter that it cannot train, before any weights are read."""
        if self.needs_base and adapter.trains_base:
            raise UserError(
                "adapter=full changes the base, whose own output is the target of this objective. Use adapter=lora."
            )
        if self.compares and adapter.dropout:
            raise UserError(
                f"adapter.dropout={adapter.dropout:g}: {self.compares} compares two predictions of the model, which "
                "dropout would give different inputs. Leave one of the two out."
            )

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise a UserError for samples that it cannot learn from, before they are encoded."""
        return

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        """Raise a UserError for samples of sizes that it cannot learn from, before training."""
        return

    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        """Return each sample's loss (B,), multiplied by its weight.

        A function of the sample, its draw and the step only: the same in any batch and on any rank.

        Args:
            noised: the batch at its timesteps.
            step: index of the current optimizer step, from 0.
        """
        raise NotImplementedError

    def passes(self, step: int) -> Passes:
        """Return the passes of each sample through the transformer; no step has more than step 0."""
        return Passes()
