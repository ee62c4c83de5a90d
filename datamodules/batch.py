"""What passes between the data and the model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class RawBatch:
    """Samples of one size, as pixels in [-1, 1].

    Attributes:
        keys: the samples' names, for messages.
        draws: how many samples were drawn before each of these since training began. All randomness of a
            sample (noise, timestep, caption dropout) is a function of the seed and of this number alone.
        prompts: one instruction a sample.
        target: (B, 3, H, W), or None where there is nothing to learn from (prediction).
        controls: the condition images, each (B, 3, h, w) at a size of its own.
        mask: (B, 1, H, W) in [0, 1], the weight of each pixel in the loss.
    """

    keys: list[str]
    draws: list[int]
    prompts: list[str]
    target: Tensor | None
    controls: list[Tensor]
    mask: Tensor | None = None


@dataclass
class LatentBatch:
    """The same samples after the frozen encoders; all that a training step needs.

    Latents are the autoencoder's own, before shift and scale.

    Attributes:
        keys, draws, mask: as in `RawBatch`.
        target_mean, target_std: (B, C, H, W), the distribution of the target's latent.
        controls: the modes of the condition images' latents, each (B, C, h, w).
        prompt: the family's text conditioning by diffusers' argument names, each (B, ...).
        empty_prompt: the same for the empty prompt, which caption dropout puts in its place.
    """

    keys: list[str]
    draws: list[int]
    target_mean: Tensor | None
    target_std: Tensor | None
    controls: list[Tensor]
    prompt: dict[str, Tensor]
    empty_prompt: dict[str, Tensor]
    mask: Tensor | None = None
