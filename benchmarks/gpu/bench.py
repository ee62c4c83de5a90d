"""The means of the checks: the device, models with real widths or tiny ones, and the results of a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra.utils import instantiate
from torch import Tensor

from datamodules.batch import LatentBatch

Facts = dict[str, Any]

# FLUX with 4 heads in place of 24: a CPU, too, takes a step with it in a second.
NARROW = {"num_attention_heads": 4}
# For a CPU alone.
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    # Z-Image's names
    "dim": 32,
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": (4, 6, 6),
}
NEEDS_CUDA = "needs CUDA"
# A `Row.base` and its model, for the rows that follow.
NOTHING_KEPT: tuple[Any, Any] = None, None


class Bench:
    """The means of a check.

    Args:
        tiny: whether models and pictures are as small as can be.
        folder: for what is written.
    """

    def __init__(self, device: torch.device, tiny: bool, folder: Path) -> None:
        self.device = device
        self.tiny = tiny
        self.folder = folder
        self.kept = NOTHING_KEPT

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def size(self, real: int, tiny: int) -> int:
        """Return the size for tiny or real models."""
        return tiny if self.tiny else real

    def repository(self, model: str, depth: int | None, narrow: bool) -> str:
        """Return the folder of a model's configuration, without weights."""
        from benchmarks.memory import write_shallow

        depth, changes = (1, TINY) if self.tiny else (depth, NARROW if narrow else {})
        folder = self.folder / f"{model} {depth} {len(changes)}"
        if not folder.is_dir():
            folder.mkdir()
            write_shallow(model, depth, str(folder), changes)
        return str(folder)

    def described(self, model: str, *more: str) -> Any:
        """Return the whole model without weights."""
        from benchmarks.memory import compose

        settings = [*more, *self.short_prompts(model)]
        cfg = compose(model, self.repository(model, None, narrow=False), "bfloat16", *settings)
        return instantiate(cfg.model, _convert_="all")

    def short_prompts(self, model: str) -> list[str]:
        """Return the settings of a tiny model's short prompts."""
        return ["model.max_sequence_length=16"] if self.tiny and model.startswith("flux") else []

    def module(
        self,
        precision: str,
        *more: str,
        model: str = "flux_kontext",
        depth: int | None = 2,
        narrow: bool = False,
        device: torch.device | None = None,
        peer: bool = False,
    ) -> Any:
        """Build a module with the same random weights each time, and an adapter that has left its start.

        Args:
            more: settings of train.py.
            depth: blocks of each kind; None for all.
            narrow: its weights are drawn on the CPU then, the same ones for each device.
            peer: whether its transformer is diffusers' own with peft's LoRA.
        """
        from benchmarks.full_size import build
        from lightning_modules.adapters.adapter import trainable

        repository, settings = self.repository(model, depth, narrow), [*more, *self.short_prompts(model)]
        made_on = torch.device("cpu") if narrow else None
        module = build(model, repository, precision, device or self.device, *settings, made_on=made_on, peer=peer)
        generator = torch.Generator().manual_seed(1)
        for parameter in trainable(module.transformer).values():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
        return module

    def batch(self, module: Any, side: int) -> LatentBatch:
        """Random latents and prompts of a sample, on the module's device."""
        from benchmarks.memory import random_batch

        return random_batch(module, self.size(side, 64), 1, module.device)

    @cached_property
    def peak(self) -> float:
        """FLOP/s of a bf16 product."""
        from lightning_modules.estimation.flops import matrix_peak

        return matrix_peak(self.device, self.size(8192, 64))

    def seconds(self, run: Any, rounds: int = 5) -> float:
        """Return the mean time of a call."""
        from lightning_modules.estimation.flops import mean_seconds

        return mean_seconds(run, self.size(rounds, 1))

    @contextmanager
    def compiler(self) -> Iterator[None]:
        """Temporarily compile tiny models to graphs only; kernels would take a CPU a minute."""
        own = torch.compile

        def graphs(*args: Any, **settings: Any) -> Any:
            return own(*args, **settings, backend="aot_eager")

        with mock.patch.object(torch, "compile", graphs if self.tiny else own):
            yield

    def free(self) -> None:
        """Free what nobody holds, and graphs if no model is kept."""
        if self.kept is NOTHING_KEPT:
            torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Return the bytes of tensors on the GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def peak_memory(self) -> int:
        """Return the peak bytes since the last call; 0 on a CPU."""
        if not self.cuda:
            return 0
        most = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return most

    def gigabytes(self, size: int) -> float | str:
        """Return bytes on the GPU in GB, for the results."""
        return round(size / 1e9, 3) if self.cuda else NEEDS_CUDA


@contextmanager
def deterministic() -> Iterator[None]:
    """Temporarily make results repeatable to the bit, and fill uninitialized memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(module: Any, batch: LatentBatch) -> dict[str, Tensor]:
    """Return the loss and the adapter's gradients."""
    from benchmarks.memory import loss
    from lightning_modules.adapters.adapter import trainable

    value = loss(module, batch)
    value.backward()
    found = {name: parameter.grad for name, parameter in trainable(module.transformer).items()}
    module.transformer.zero_grad(set_to_none=True)
    return {"loss": value.detach(), **{name: grad for name, grad in found.items() if grad is not None}}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit."""
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the relative distance of all gradients together, as a share of the norm of the second ones."""
    squares = [
        ((one[name].cpu() - tensor.cpu()).square().sum(), tensor.cpu().square().sum())
        for name, tensor in other.items()
        if name != "loss"
    ]
    far, size = (torch.stack(list(part)).sum() for part in zip(*squares, strict=True))
    return float((far / size).sqrt())
