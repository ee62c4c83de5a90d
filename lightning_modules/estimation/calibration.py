"""How much a step may keep for its backward pass: an estimate, corrected by what steps have taken."""

import logging
from collections.abc import Callable, Mapping

import torch
from rich.filesize import decimal

from datamodules.pairs import PairsDataModule
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.estimation.activations import FakeStep, empty_latents, heaviest_batch
from lightning_modules.estimation.flops import Passes
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase

log = logging.getLogger("retouch")

# Of what is free; the rest is for kernels' own memory, and for what lies between tensors.
USABLE = 0.9


class DeviceMemory:
    """What PyTorch's allocator has counted on a CUDA device; asking does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        """Count the most from now on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def taken(self) -> int:
        """The most bytes since `restart` beyond what there is now."""
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Bytes that tensors can still take."""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached


class Calibration:
    """Raises a checkpointing policy from `full`, one position after each step, as long as the next one fits.

    Each position is tried on what the one before has taken, which corrects the estimate upwards only.

    Args:
        needs: the estimated bytes of the heaviest batch's step, by policy.
        tokens: of that batch.

    Attributes:
        policy: of the next step.
        is_done: whether it stays.
    """

    def __init__(self, needs: Mapping[str, int], tokens: int) -> None:
        self.needs = needs
        self.tokens = tokens
        self.policy = POLICIES[-1]
        self.is_done = False
        self._factor = 1.0

    def expected(self, policy: str) -> int:
        """Bytes of the heaviest batch's step, corrected."""
        return round(self._factor * self.needs[policy])

    def excess(self, taken: int, tokens: int) -> float:
        """What a step of so many tokens has taken, over what was estimated."""
        return taken * self.tokens / (self.needs[self.policy] * tokens)

    def after_step(self, excess: float, free: float) -> None:
        """Choose the next policy.

        Args:
            excess: of the step, by `excess`.
            free: bytes, beside the weights and the optimizer's state.
        """
        self._factor = max(self._factor, excess)
        place = POLICIES.index(self.policy)
        following = POLICIES[place - 1] if place else None
        if following is None or self.expected(following) > USABLE * free:
            self.is_done = True
        else:
            self.policy = following


def estimate(
    family: Family,
    base: FrozenBase,
    adapter: Adapter,
    compiled: bool,
    meta_transformer: Callable[[], torch.nn.Module],
    data: PairsDataModule,
    passes: Passes,
) -> Calibration:
    """A calibration for this data, by simulating a step of its heaviest batch with each policy.

    Args:
        compiled: whether the blocks are.
        meta_transformer: makes the transformer on the meta device, with its adapter.
        passes: of each sample, in a step that has the most.
    """
    log.info("estimating what a step takes of the memory, which may be a minute")
    heaviest = heaviest_batch(family, base, data)
    batch = empty_latents(family, base, heaviest.size, heaviest.samples, heaviest.caption)
    step = FakeStep(family, adapter, base.dtype, compiled, meta_transformer(), batch, passes)
    needs = {policy: step.peak(policy) for policy in POLICIES}
    listed = ", ".join(f"{policy} {decimal(size)}" for policy, size in needs.items())
    log.info(f"model.gradient_checkpointing=auto begins with {POLICIES[-1]}; a step is estimated to take {listed}")
    return Calibration(needs, heaviest.tokens)
