"""Rectified flow: pure functions, and batches at random timesteps.

One convention: x_t = (1 - t) x0 + t eps, t in [0, 1], t = 1 is noise. All randomness is a function of the seed and of a
sample's draw, except adapter.dropout, which is one of the seed and of all draws of a process's batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from datamodules.batch import LatentBatch, copy_to
from foundation.errors import UserError


def interpolate(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """(B, ...), (B, ...), (B,) -> x_t (B, ...)."""
    t = t.view(-1, *[1] * (x0.ndim - 1))
    return (1 - t) * x0 + t * eps


def velocity_target(x0: Tensor, eps: Tensor) -> Tensor:
    """Return dx_t / dt."""
    return eps - x0


def flow_loss(velocity: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return each sample's mean squared error in float32: (B, C, h, w) -> (B,).

    `mask` (B, 1, H, W) weights the pixels. It is averaged down to the latent's size, and normalised for each sample.
    """
    error = (velocity.float() - target.float()).square()
    if mask is None:
        return error.mean(dim=(1, 2, 3))
    return mean_over_positions(error.mean(dim=1, keepdim=True), area_weights(mask, error))


def area_weights(mask: Tensor, like: Tensor) -> Tensor:
    """Average a mask (B, 1, H, W) over the area of each position of the latent: (B, 1, h, w)."""
    return torch.nn.functional.interpolate(mask.float(), size=like.shape[-2:], mode="area")


def mean_over_positions(error: Tensor, weight: Tensor | None) -> Tensor:
    """(B, 1, h, w) -> (B,), normalised by the total weight, so the size of the weighted area does not matter."""
    if weight is None:
        return error.mean(dim=(1, 2, 3))
    return (error * weight).sum(dim=(1, 2, 3)) / weight.sum(dim=(1, 2, 3)).clamp_min(1e-6)


def shift_time(t: Tensor, shift: float | Tensor) -> Tensor:
    """Move t towards noise: s t / (1 + (s - 1) t). The schedulers' `mu` is log s."""
    return shift * t / (1 + (shift - 1) * t)


def dynamic_shift(tokens: int, config: Mapping[str, Any]) -> float:
    """Return the pipelines' resolution-dependent shift: exp(mu), mu linear in the target's token count.

    Args:
        config: a scheduler's settings; as in the pipelines, missing numbers are FLUX.1's.
    """
    base_tokens, most_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (most_tokens - base_tokens)
    return math.exp(base_shift + slope * (tokens - base_tokens))


# Scale s of SD3's timestep law `mode`; the paper's choice.
MODE_SCALE = 1.29


@dataclass(frozen=True)
class TimestepLaw:
    """The distribution of training timesteps.

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
        """Draw one timestep, a float32 scalar in [0, 1]; `shift: dynamic` is `pipeline_shift`."""
        if self.law == "logit_normal":
            t = torch.sigmoid(self.logit_mean + self.logit_std * torch.randn((), generator=generator))
        else:
            t = torch.rand((), generator=generator)
        if self.law == "mode":
            t = 1 - t - MODE_SCALE * (torch.cos(math.pi / 2 * t).square() - 1 + t)
        if self.shift is None:
            return t
        return shift_time(t, pipeline_shift if isinstance(self.shift, str) else self.shift)


class Noise(NamedTuple):
    """The randomness of a batch, on the CPU in float32.

    Attributes:
        t: (B,) timesteps.
        eps: (B, C, h, w) noise to add.
        latent_eps: (B, C, h, w) noise that picks the target from the autoencoder's distribution.
    """

    t: Tensor
    eps: Tensor
    latent_eps: Tensor


def sample_noise(seed: int, draws: list[int], shape: torch.Size, law: TimestepLaw, pipeline_shift: float) -> Noise:
    """Draw all randomness of some samples.

    A function of (seed, draw) only: the same in any batch, on any rank and device, with any accumulation, and after a
    resume.

    Args:
        draws: the numbers of their draws.
        shape: (C, h, w), the shape of one sample's latent.
    """

    def one(generator: torch.Generator) -> Noise:
        t = law.draw(generator, pipeline_shift)
        return Noise(t, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))

    drawn = [one(torch.Generator().manual_seed(mix(seed, draw))) for draw in draws]
    return Noise(*map(torch.stack, zip(*drawn, strict=True)))


def mix(seed: int, number: int) -> int:
    """Make one 63-bit seed from two integers (splitmix64), so that neighbours are unrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1


class Noised(NamedTuple):
    """A batch at its timesteps, on the device.

    Attributes:
        x0: (B, C, h, w) target.
        mean: (B, C, h, w) of the distribution that x0 is drawn from.
        eps: (B, C, h, w) noise.
        t: (B,).
        controls: each (B, C, h, w).
        prompt: the text conditioning.
        rejected: (B, C, h, w) result to be liked less than x0; None if unknown.
        edited: (B, C, h, w) control that x0 edits; None without one.
    """

    x0: Tensor
    mean: Tensor
    eps: Tensor
    t: Tensor
    controls: list[Tensor]
    prompt: Mapping[str, Tensor]
    rejected: Tensor | None = None
    edited: Tensor | None = None

    @property
    def x_t(self) -> Tensor:
        """The noised target (B, C, h, w)."""
        return interpolate(self.x0, self.eps, self.t)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, list[Tensor], Mapping[str, Tensor]]:
        """The arguments of `Denoiser`."""
        return self.x_t, self.t, self.controls, self.prompt

    @property
    def velocity(self) -> Tensor:
        """The velocity to learn (B, C, h, w)."""
        return velocity_target(self.x0, self.eps)


@dataclass
class FlowMatching:
    """Takes batches to their timesteps.

    Args:
        timesteps: the distribution of training timesteps.
        vae_encode_mode: train on a `sample` of the target's latent distribution, or on its `mode`.
        normalize: shifts and scales latents, as `Family.normalize`.
        pipeline_shift: returns the shift of a batch's timesteps with `shift: dynamic`.
    """

    timesteps: TimestepLaw
    vae_encode_mode: str
    seed: int
    normalize: Callable[[Tensor], Tensor]
    pipeline_shift: Callable[[LatentBatch], float]

    def __post_init__(self) -> None:
        if self.vae_encode_mode not in ("sample", "mode"):
            raise UserError(f"model.vae_encode_mode={self.vae_encode_mode}: choose sample or mode")

    def noised(self, batch: LatentBatch) -> Noised:
        """Noise a batch as the seed and its draws determine."""
        shift, shape = self.pipeline_shift(batch), batch.known_target.shape[1:]
        return self.noised_by(batch, sample_noise(self.seed, batch.draws, shape, self.timesteps, shift))

    def noised_by(self, batch: LatentBatch, noise: Noise) -> Noised:
        """Noise a batch with this noise."""
        device = batch.known_target.device
        latent_eps = copy_to(noise.latent_eps, device) if self.vae_encode_mode == "sample" else None

        def drawn(mean: Tensor, std: Tensor | None) -> Tensor:
            if latent_eps is None:
                return self.normalize(mean.float())
            assert std is not None
            return self.normalize(mean.float() + std.float() * latent_eps)

        controls = [self.normalize(control.float()) for control in batch.controls]
        return Noised(
            x0=drawn(batch.known_target, batch.target_std),
            mean=self.normalize(batch.known_target.float()),
            eps=copy_to(noise.eps, device),
            t=copy_to(noise.t, device),
            controls=controls,
            prompt=batch.prompt,
            rejected=None if batch.rejected_mean is None else drawn(batch.rejected_mean, batch.rejected_std),
            edited=controls[0] if controls and batch.has_first else None,
        )
