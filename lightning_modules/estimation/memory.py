"""The memory of a training step: estimated by a step on fake tensors, and corrected by real steps."""

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from datamodules.batch import LatentBatch
from datamodules.images.resizing import Size
from datamodules.pairs import PairsDataModule
from datamodules.sampler import samples_per_batch
from lightning_modules import flow
from lightning_modules.estimation.flops import all_components, empty_latents
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from lightning_modules.execution.execution import Execution
from lightning_modules.family import Family
from lightning_modules.objectives.objective import ONE, Passes
from lightning_modules.pretrained.frozen_base import FrozenBase

log = logging.getLogger("retouch")

FLOAT32_NORMS = (F.layer_norm, F.rms_norm, F.group_norm)
# Share of the free memory that a step may use: the rest is for kernels' own memory, and for fragmentation.
USABLE = 0.9


class Heaviest(NamedTuple):
    """The batch with the most tokens."""

    samples: int
    size: Size  # of each sample
    tokens: int  # of all samples
    caption: str  # the longest one, including preserve prompts
    limits: dict[Size, int]  # samples per batch, by size


def heaviest_batch(family: Family, base: FrozenBase, data: PairsDataModule) -> Heaviest:
    """Find the heaviest batch of data that has been scanned."""
    split = data.training
    caption = max((*split.captions, *data.preserve_prompts), key=len, default="")
    tokens = {
        size: family.geometry.token_count(empty_latents(family, base, size, 1, caption)) for size in set(split.sizes)
    }
    limits = {size: samples_per_batch(data.batch_size, data.max_tokens_per_batch, n) for size, n in tokens.items()}
    size = max(tokens, key=lambda size: limits[size] * tokens[size])
    return Heaviest(limits[size], size, limits[size] * tokens[size], caption, limits)


def bytes_per_parameter(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """Return the bytes of an optimizer's state per parameter, by a step on a small matrix."""
    parameter = nn.Parameter(torch.ones(256, 256, device="cpu"))
    made: Any = optimizer([parameter])
    if hasattr(made, "train"):  # schedule-free
        made.train()
    parameter.grad = torch.ones_like(parameter)
    made.step()
    state = [tensor for tensor in tree_iter(made.state) if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in state if tensor.numel() > 1) / parameter.numel()


class PeakMemory(TorchDispatchMode):
    """A mode that counts the bytes of all tensors created in it that are still alive: `now`, and their `peak`.

    Args:
        device_type: count tensors on such a device only.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self._alive: dict[int, int] = {}
        self.now = self._start = self._most = 0

    @property
    def peak(self) -> int:
        """The most bytes alive since `restart`, beyond those alive then."""
        return self._most - self._start

    def restart(self) -> None:
        self._start = self._most = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # of fake tensors, in most of the calls
            return args[0].device
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and self.device_type in (None, tensor.device.type):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    self.now += self._alive[key]
                    self._most = max(self._most, self.now)
                    weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


class OnCuda(TorchFunctionMode):
    """A mode in which fake CPU tensors take the memory of a GPU's: norms in float32, fused attention.

    Args:
        dtype: the base's dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in FLOAT32_NORMS:
            args = tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {name: arg.float() if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        elif function is F.scaled_dot_product_attention:  # the CPU's keeps the same tensors as FlashAttention
            names = ("query", "key", "value")
            inputs = dict(zip(names, args, strict=False)) | dict(kwargs)
            args, kwargs = tuple(inputs[name].to(self.dtype) for name in names), {}
        return function(*args, **kwargs)


def fake_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace a model's meta tensors by fake ones, frozen weights in `dtype`; call it within a FakeTensorMode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = parameter.dtype if parameter.requires_grad else dtype
                fake = torch.empty(parameter.shape, dtype=kind)
                module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
        attributes: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
        for place in attributes:
            tensors = {name: value for name, value in place.items() if isinstance(value, Tensor)}
            place.update({name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()})
    return model


class FakeStep:
    """The forward and backward passes of a batch on tensors without content.

    Args:
        execution: runs the transformer and its adapter.
        batch: a batch on the meta device.
        passes: the passes of each sample.

    Attributes:
        transformer: the transformer with its adapter.
    """

    def __init__(self, execution: Execution, batch: LatentBatch, passes: Passes = ONE) -> None:
        self.execution, self.passes, self.dtype = execution, passes, execution.base.dtype
        self._mode, self._memory = FakeTensorMode(), PeakMemory()
        transformer = execution.adapted_meta_transformer()
        with self._mode, self._memory:
            self.transformer = fake_model(transformer, self.dtype).train()
            self._x_t, self._eps, *self._controls = (
                torch.empty(latent.shape) for latent in (batch.known_target, batch.known_target, *batch.controls)
            )
            self._prompt = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.prompt.items()
            }
            self._mask = None if batch.mask is None else torch.empty(batch.mask.shape)
            self._t = torch.empty(len(self._x_t))

    def _recomputed(self, block: Callable[..., Any], policy: str) -> Callable[..., Any]:
        """Compute again as on CUDA: PyTorch leaves the mode in a backward pass."""

        def run(*args: Any) -> Any:
            with OnCuda(self.dtype):
                return block(*args)

        return self.execution.recomputed(run, policy)

    def _loss(self) -> Tensor:
        family = self.execution.family
        velocity = family.velocity(self.transformer, self._x_t, self._t, self._controls, self._prompt)
        return flow.flow_loss(velocity, self._eps, self._mask).mean()

    def peak(self, policy: str) -> int:
        """Return the most bytes, besides weights, that it holds with this `gradient_checkpointing`."""
        set_checkpointing(self.transformer, policy, self._recomputed)
        with self._mode, self._memory, OnCuda(self.dtype), all_components(self.execution, len(self._x_t), "cpu"):
            self._memory.restart()
            with torch.autocast("cpu", self.dtype) if self.dtype != torch.float32 else nullcontext():
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


class DeviceMemory:
    """Counts of PyTorch's allocator on a CUDA device; reading them does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def taken(self) -> int:
        """Return the peak since `restart` beyond the bytes in use now."""
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Return the bytes that tensors can still take."""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached


def policy_needs(execution: Execution, data: PairsDataModule, passes: Passes) -> tuple[dict[str, int], int]:
    """Estimate the bytes of a step of the heaviest batch by checkpointing policy; return them and the batch's tokens.

    Args:
        passes: the passes of each sample in a step that has the most.
    """
    log.info("estimating the memory of a step, which may take a minute")
    family, base = execution.family, execution.base
    heaviest = heaviest_batch(family, base, data)
    step = FakeStep(execution, empty_latents(family, base, heaviest.size, heaviest.samples, heaviest.caption), passes)
    return {policy: step.peak(policy) for policy in POLICIES}, heaviest.tokens


def fits(needs: Mapping[str, int], policy: str, excess: float, free: float) -> bool:
    """Return whether a step with this checkpointing policy fits into a device's memory; `full` must.

    Args:
        needs: estimated bytes of the heaviest batch's step, by policy; empty if unknown.
        excess: bytes of a real step relative to its estimate; more than 1 corrects all estimates.
        free: bytes besides the weights and the optimizer's state.
    """
    return policy == POLICIES[-1] or max(1, excess) * needs.get(policy, math.inf) <= USABLE * free


def choose_policy(needs: Mapping[str, int], excess: float, free: float) -> str:
    """Return the checkpointing policy with the least recomputation that fits; arguments as for `fits`."""
    return next(policy for policy in POLICIES if fits(needs, policy, excess, free))
