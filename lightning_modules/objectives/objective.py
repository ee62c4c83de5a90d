"""What trains towards what: the interface of objectives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from datamodules.images.framing import Size
from datamodules.images.samples import Sample
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.denoiser import Denoiser
from lightning_modules.estimation.flops import Passes
from lightning_modules.family import Family
from lightning_modules.flow_matching import Noised


class Objective(ABC):
    """What a training step minimizes.

    Attributes:
        name: what a LoRA's file says of it.
        scales: of the LoRA, at which pictures show what was learned.
        needs_base: whether it asks for the base's velocity.
        compares: what of it compares two of the model's predictions, which dropout would make unlike; else empty.
        needs_empty_prompt: whether batches must have the empty prompt's conditioning.
        preserve_prompts: the prompts of which each sample has one beside its own, in `LatentBatch.preserve_prompt`.
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

    def check(self, family: Family, adapter: Adapter) -> None:
        """Raise a UserError for a model or an adapter that it cannot train, before any weights are read."""
        if self.needs_base and adapter.trains_base:
            raise UserError(
                "objective: the base's own output is its target, and adapter=full changes the base: use adapter=lora"
            )
        if self.compares and adapter.dropout:
            raise UserError(
                f"adapter.dropout={adapter.dropout:g} does not go with {self.compares}, which compares two predictions "
                "of the model: each would see other inputs. Leave one of the two out"
            )

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise a UserError for samples that it cannot learn from, before they are encoded."""
        return

    def check_sizes(self, sizes: Sequence[Size]) -> None:
        """The same by all that is known of samples once they are encoded; none where they are streamed."""
        return

    @abstractmethod
    def losses(self, batch: LatentBatch, noised: Noised, model: Denoiser, step: int) -> Tensor:
        """Each sample's loss (B,), its weight in it.

        A function of the sample, its draw and the step alone: the same in any batch and on any rank.

        Args:
            noised: the batch at its timesteps.
            step: the number of the optimizer step that is under way, from 0.
        """

    def passes(self, step: int) -> Passes:
        """Each sample's through the transformer in an optimizer step; no step has more than the first, 0."""
        return Passes()

    def describe(self) -> str:
        """What it costs beyond one forward and backward a step, for the summary; nothing for none."""
        return ""
