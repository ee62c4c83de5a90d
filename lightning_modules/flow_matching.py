"""Batches at their timesteps: all randomness of training, drawn from the seed and the number of a sample's draw."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.batch import LatentBatch, copy_to, pad_to
from datamodules.errors import UserError
from lightning_modules.flow import Noise, TimestepLaw, flow_loss, interpolate, sample_noise, velocity_target


class Noised(NamedTuple):
    """A batch at its timesteps, on the device: what a transformer sees of it.

    Attributes:
        x0: (B, C, h, w) the target.
        mean: (B, C, h, w) of the distribution that it is a sample of.
        eps: (B, C, h, w) the noise.
        t: (B,).
        controls: each (B, C, h, w).
        prompt: the conditioning, of some samples the empty prompt's.
        dropped: (B,), of which; on the host.
        rejected: (B, C, h, w), what is to be liked less than x0; None where it is not known.
    """

    x0: Tensor
    mean: Tensor
    eps: Tensor
    t: Tensor
    controls: list[Tensor]
    prompt: Mapping[str, Tensor]
    dropped: Tensor
    rejected: Tensor | None = None

    @property
    def x_t(self) -> Tensor:
        """(B, C, h, w)."""
        return self.x_t_of(self.x0)

    def x_t_of(self, x0: Tensor) -> Tensor:
        """With another target in its place."""
        return interpolate(x0, self.eps, self.t)

    @property
    def velocity(self) -> Tensor:
        """(B, C, h, w), the plain target."""
        return velocity_target(self.x0, self.eps)


class FlowMatching:
    """Batches at their timesteps, all randomness drawn from (seed, draw number), and the plain loss.

    Args:
        timesteps: the distribution of training timesteps.
        vae_encode_mode: train on a `sample` of the target's latent distribution, or on its `mode`.

    Attributes:
        caption_dropout_rate: share of the samples that are seen with the empty prompt; the data's.
    """

    def __init__(self, timesteps: TimestepLaw, vae_encode_mode: str, seed: int) -> None:
        if vae_encode_mode not in ("sample", "mode"):
            raise UserError(f"model.vae_encode_mode={vae_encode_mode}: choose sample or mode")
        self.timesteps = timesteps
        self.vae_encode_mode = vae_encode_mode
        self.seed = seed
        self.caption_dropout_rate = 0.0

    def noised(self, batch: LatentBatch, pipeline_shift: float, normalize: Callable[[Tensor], Tensor]) -> Noised:
        """A batch at the timesteps and with the noise of its draws.

        Args:
            pipeline_shift: what `shift: dynamic` stands for in the timesteps' distribution.
            normalize: of `Family`.
        """
        assert batch.target_mean is not None
        noise = sample_noise(self.seed, batch.draws, batch.target_mean.shape[1:], self.timesteps, pipeline_shift)
        return self.noised_by(batch, noise, normalize)

    def noised_by(self, batch: LatentBatch, noise: Noise, normalize: Callable[[Tensor], Tensor]) -> Noised:
        """A batch at these timesteps, with this noise."""
        mean = batch.target_mean
        assert mean is not None
        t, eps = copy_to(noise.t, mean.device), copy_to(noise.eps, mean.device)
        latent_eps = copy_to(noise.latent_eps, mean.device) if self.vae_encode_mode == "sample" else None

        def drawn(mean: Tensor, std: Tensor | None) -> Tensor:
            if latent_eps is None:
                return normalize(mean.float())
            assert std is not None
            return normalize(mean.float() + std.float() * latent_eps)

        rejected = batch.rejected_mean
        dropped = noise.dropout < self.caption_dropout_rate
        return Noised(
            drawn(mean, batch.target_std),
            normalize(mean.float()),
            eps,
            t,
            [normalize(control.float()) for control in batch.controls],
            drop_captions(batch, dropped),
            dropped,
            None if rejected is None else drawn(rejected, batch.rejected_std),
        )

    def losses_at(
        self, batch: LatentBatch, noise: Noise, normalize: Callable[[Tensor], Tensor], denoise: Callable[..., Tensor]
    ) -> Tensor:
        """Each sample's plain loss (B,) at these timesteps, with this noise: whatever trains, runs compare by it.

        Args:
            denoise: `Family.velocity` of a transformer.
        """
        noised = self.noised_by(batch, noise, normalize)
        losses = flow_loss(denoise(noised.x_t, noised.t, noised.controls, noised.prompt), noised.velocity, batch.mask)
        return losses if batch.weights is None else losses * batch.weights


def drop_captions(batch: LatentBatch, drop: Tensor) -> Mapping[str, Tensor]:
    """The prompt conditioning with the empty prompt's in the place of some samples'.

    Args:
        drop: (B,), of which; on the host.
    """
    if not drop.any():
        return batch.prompt
    if drop.all():
        return {name: empty.expand(len(drop), *empty.shape[1:]) for name, empty in batch.empty_prompt.items()}
    mixed = {}
    for name, tensor in batch.prompt.items():
        empty = batch.empty_prompt[name]
        longest = max(tensor.shape[1], empty.shape[1])
        chosen = copy_to(drop, tensor.device).view(-1, *[1] * (tensor.ndim - 1))
        mixed[name] = torch.where(chosen, pad_to(empty, longest), pad_to(tensor, longest))
    return mixed
