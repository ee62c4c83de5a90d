"""Rectified flow, as pure functions. One convention: x_t = (1 - t) x0 + t eps, t in [0, 1], t = 1 is noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from datamodules.errors import UserError


def interpolate(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """(B, ...), (B, ...), (B,) -> x_t (B, ...)."""
    t = t.view(-1, *[1] * (x0.ndim - 1))
    return (1 - t) * x0 + t * eps


def velocity_target(x0: Tensor, eps: Tensor) -> Tensor:
    """dx_t / dt."""
    return eps - x0


def flow_loss(velocity: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of each sample in float32: (B, C, h, w) -> (B,).

    `mask` (B, 1, H, W) weighs the pixels; it is averaged down to the latent's size, and the weights of a
    sample sum to one.
    """
    error = (velocity.float() - target.float()).square()
    if mask is None:
        return error.mean(dim=(1, 2, 3))
    return weighted_mean(error.mean(dim=1, keepdim=True), area_weights(mask, error))


def area_weights(mask: Tensor, like: Tensor) -> Tensor:
    """The mean of a mask (B, 1, H, W) over the area of each of the latent's places, (B, 1, h, w)."""
    return torch.nn.functional.interpolate(mask.float(), size=like.shape[-2:], mode="area")


def weighted_mean(error: Tensor, weight: Tensor | None) -> Tensor:
    """(B, 1, h, w) -> (B,): how large an area has weight does not weigh the sample."""
    if weight is None:
        return error.mean(dim=(1, 2, 3))
    return (error * weight).sum(dim=(1, 2, 3)) / weight.sum(dim=(1, 2, 3)).clamp_min(1e-6)


def shift_time(t: Tensor, shift: float | Tensor) -> Tensor:
    """Move t towards noise: s t / (1 + (s - 1) t). The schedulers' `mu` is log s."""
    return shift * t / (1 + (shift - 1) * t)


def dynamic_shift(tokens: int, config: Mapping[str, Any]) -> float:
    """The pipelines' resolution-dependent shift: exp(mu), mu linear in the target's token count.

    Args:
        config: a scheduler's; pipelines take FLUX.1's numbers for those that it lacks.
    """
    base_tokens, most_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (most_tokens - base_tokens)
    return math.exp(base_shift + slope * (tokens - base_tokens))


# Scale s of SD3's timestep law `mode`; the paper's choice.
MODE_SCALE = 1.29


@dataclass(frozen=True)
class TimestepLaw:
    """How training timesteps are distributed.

    Args:
        law: `uniform`; `logit_normal`, sigmoid(N(logit_mean, logit_std)); `mode`, 1 - u - MODE_SCALE *
            (cos^2(pi u / 2) - 1 + u), heavy in the middle (arXiv 2403.03206, section 3.1).
        shift: None, a constant (3 moves towards noise), or `dynamic`, the pipelines' own for the size.
    """

    law: Literal["uniform", "logit_normal", "mode"]
    logit_mean: float
    logit_std: float
    shift: float | Literal["dynamic"] | None

    def __post_init__(self) -> None:
        if self.law not in ("uniform", "logit_normal", "mode"):
            raise UserError(f"model.timesteps.law={self.law}: choose uniform, logit_normal or mode")

    def draw(self, generator: torch.Generator, pipeline_shift: float) -> Tensor:
        """One timestep, a float32 scalar in [0, 1]; `pipeline_shift` is what `shift: dynamic` stands for."""
        if self.law == "logit_normal":
            t = torch.sigmoid(self.logit_mean + self.logit_std * torch.randn((), generator=generator))
        else:
            t = torch.rand((), generator=generator)
        if self.law == "mode":
            t = 1 - t - MODE_SCALE * (torch.cos(math.pi / 2 * t).square() - 1 + t)
        if self.shift is None:
            return t
        return shift_time(t, pipeline_shift if isinstance(self.shift, str) else self.shift)


@dataclass
class Noise:
    """The randomness of a batch, on the CPU in float32.

    Attributes:
        t: (B,) timesteps.
        eps: (B, C, h, w) the noise to add.
        latent_eps: (B, C, h, w) picks the target from the autoencoder's distribution.
        dropout: (B,) uniform in [0, 1); the caption is dropped below the rate.
    """

    t: Tensor
    eps: Tensor
    latent_eps: Tensor
    dropout: Tensor


def sample_noise(seed: int, draws: list[int], shape: torch.Size, law: TimestepLaw, pipeline_shift: float) -> Noise:
    """All that is random about samples number `draws`; `shape` is one sample's latent (C, h, w).

    A function of (seed, number) alone: the same in any batch, on any rank, at any accumulation, on any device,
    and after a resume.
    """
    t, eps, latent_eps, dropout = [], [], [], []
    for number in draws:
        generator = _generator(seed, number)
        t.append(law.draw(generator, pipeline_shift))
        dropout.append(torch.rand((), generator=generator))
        eps.append(torch.randn(shape, generator=generator))
        latent_eps.append(torch.randn(shape, generator=generator))
    return Noise(torch.stack(t), torch.stack(eps), torch.stack(latent_eps), torch.stack(dropout))


def draw_timesteps(seed: int, count: int, law: TimestepLaw, pipeline_shift: float) -> Tensor:
    """(count,), what `sample_noise` gives as t of the first samples."""
    return torch.stack([law.draw(_generator(seed, number), pipeline_shift) for number in range(count)])


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, number))


def mix(seed: int, number: int) -> int:
    """One 63-bit seed from two integers (splitmix64), so that neighbours are unrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1
