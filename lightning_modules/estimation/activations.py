"""What a training step holds for its backward pass, by a step on fake tensors."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from datamodules.batch import LatentBatch
from datamodules.images.framing import Size
from datamodules.pairs import PairsDataModule
from datamodules.sampler import samples_per_batch
from lightning_modules import flow
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.estimation.fake_tensors import OnCuda, PeakMemory, fake_like, fake_model
from lightning_modules.estimation.flops import ONE, Passes
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase

log = logging.getLogger("retouch")


class Heaviest(NamedTuple):
    """The batch with the most tokens.

    Attributes:
        samples: how many it has.
        size: theirs.
        tokens: in all.
        caption: the longest one, preserve prompts among them.
        tokens_of: a sample of each size.
        limits: how many samples of each size make a batch.
    """

    samples: int
    size: Size
    tokens: int
    caption: str
    tokens_of: dict[Size, int]
    limits: dict[Size, int]


def heaviest_batch(family: Family, base: FrozenBase, data: PairsDataModule) -> Heaviest:
    """Of the data, which has been scanned."""
    captions = (prompt for sample in data.samples for prompt in sample.prompts)
    caption = max((*captions, *data.preserve_prompts), key=len, default="")
    tokens = {
        size: family.geometry.token_count(empty_latents(family, base, size, 1, caption)) for size in set(data.sizes)
    }
    limits = {size: samples_per_batch(data.batch_size, data.max_tokens_per_batch, n) for size, n in tokens.items()}
    size = max(tokens, key=lambda size: limits[size] * tokens[size])
    return Heaviest(limits[size], size, limits[size] * tokens[size], caption, tokens, limits)


def empty_latents(family: Family, base: FrozenBase, size: Size, samples: int, caption: str) -> LatentBatch:
    """A batch without content, on the meta device."""
    (target, *controls), beside = size
    config = base.source.config()
    channels = family.geometry.channels(config)

    def empty(image: tuple[int, int]) -> Tensor:
        return torch.empty(samples, channels, *base.latent_size(*image), dtype=base.dtype, device="meta")

    prompt = {
        name: torch.empty(samples, *shape, dtype=base.dtype, device="meta")
        for name, shape in family.prompt_shapes(config, caption, controls).items()
    }
    return LatentBatch(
        [""] * samples,
        [0] * samples,
        empty(target),
        empty(target),
        [empty(one) for one in controls],
        prompt,
        {},
        torch.empty(samples, 1, target[1], target[0], dtype=torch.uint8, device="meta") if "mask" in beside else None,
        rejected_mean=empty(target) if "rejected" in beside else None,
        rejected_std=empty(target) if "rejected" in beside else None,
    )


def bytes_per_parameter(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """The optimizer's state, by taking a step with it on a small matrix."""
    parameter = nn.Parameter(torch.ones(256, 256, device="cpu"))
    made: Any = optimizer([parameter])
    if hasattr(made, "train"):  # schedule-free
        made.train()
    parameter.grad = torch.ones_like(parameter)
    made.step()
    state = [tensor for tensor in tree_iter(made.state) if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in state if tensor.numel() > 1) / parameter.numel()


class FakeStep:
    """Forward and backward of a batch on tensors without content.

    Args:
        dtype: of the base.
        compiled: whether the blocks are.
        transformer: on the meta device, with its adapter; its tensors are replaced.
        batch: without content.
        passes: of each sample.
    """

    def __init__(
        self,
        family: Family,
        adapter: Adapter,
        dtype: torch.dtype,
        compiled: bool,
        transformer: nn.Module,
        batch: LatentBatch,
        passes: Passes = ONE,
    ) -> None:
        self.family = family
        self.passes = passes
        self.adapter = adapter
        self.dtype = dtype
        self.compiled = compiled
        self._mode, self._memory = FakeTensorMode(), PeakMemory()
        with self._mode, self._memory:
            self.transformer = fake_model(transformer, dtype).train()
            self._x_t, self._eps, *self._controls = (
                fake_like(latent).float() for latent in (batch.target_mean, batch.target_mean, *batch.controls)
            )
            self._prompt = {name: fake_like(tensor) for name, tensor in batch.prompt.items()}
            self._mask = None if batch.mask is None else fake_like(batch.mask).float()
            self._t = torch.empty(len(self._x_t))

    def _bind(self, block: nn.Module) -> Callable[..., Any]:
        """As the adapter's `bind_rank_mask`, and as on CUDA: in a backward pass PyTorch sets the mode aside."""
        again = self.adapter.bind_rank_mask(block)

        def run(*args: Any) -> Any:
            with OnCuda(self.dtype):
                return again(*args)

        return run

    def _loss(self) -> Tensor:
        velocity = self.family.velocity(self.transformer, self._x_t, self._t, self._controls, self._prompt)
        return flow.flow_loss(velocity, self._eps, self._mask).mean()

    def peak(self, policy: str) -> int:
        """The most bytes beside weights that it holds with this `gradient_checkpointing`."""
        dtype = self.dtype
        # What is compiled keeps by itself what `selective` does.
        kept = "selective" if policy == "none" and self.compiled else policy
        set_checkpointing(self.transformer, kept, self._bind)
        with self._mode, self._memory, OnCuda(dtype):
            for gate in self.adapter.rank_gates():
                gate.factors = torch.ones(len(self._x_t), gate.rows, dtype=torch.bool)
            self._memory.restart()
            with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
                loss = self._loss()
                with torch.no_grad():
                    for _ in range(self.passes.forward):
                        self._loss()
                for _ in range(self.passes.training - 1):
                    loss = loss + self._loss()
                loss.backward()
            del loss
            self.transformer.zero_grad(set_to_none=True)
        return self._memory.peak
