"""Krea 2's velocity as pure functions: positions, and references by the two schemes of its users."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.families.patches import pack, padding_mask, predict_target, token_grid
from lightning_modules.family import dynamic_mu


class EditScheme(NamedTuple):
    """A way to show references to Krea 2, which was trained without any; a LoRA works only with its own.

    Attributes:
        label: text before each image in the prompt, with its number.
        clean: whether references are modulated as at t = 0, else at the target's t.
        fitted: whether they are resized to fit into the target, and are in its center.
    """

    label: str
    clean: bool
    fitted: bool


# ai-toolkit's (krea2.py, model_kwargs.edit), and that of the Identity Edit LoRAs (lbouaraba/comfyui-krea2edit 1.2).
SCHEMES = {
    "after": EditScheme("Picture {}: ", clean=True, fitted=False),
    "before": EditScheme("", clean=False, fitted=True),
}


def krea2_mu(config: Mapping[str, Any], tokens: int, num_inference_steps: int) -> float:
    """Return the shift of timesteps; arguments as for `SamplingRules.mu`. The distilled model's is constant."""
    return 1.15 if config.get("is_distilled") else dynamic_mu(config, tokens, num_inference_steps)


def krea2_ids(image: Tensor, index: int = 0, offset: tuple[float, float] = (0, 0)) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): index of the image, row and column.

    Args:
        index: 0 for the target, 1, 2, ... for its references.
        offset: (down, right) from the target's corner.
    """
    rows, columns = token_grid(image, torch.float32)
    return torch.stack([torch.full_like(rows, index), rows + offset[0], columns + offset[1]], dim=-1).reshape(-1, 3)


@contextmanager
def references(transformer: Any, images: Sequence[Tensor], sides: Sequence[int], scheme: EditScheme) -> Iterator[None]:
    """Temporarily append references to the image tokens of each call; it still returns the target's only.

    They precede the target in one scheme. The order makes no difference: attention knows tokens by their positions.

    Args:
        images: normalized latents (B, C, h, w), each of its own size.
        sides: (height, width) of the target's latent.
    """
    if not images:
        yield
        return
    ids = []
    for index, image in enumerate(images, 1):
        down, right = (max(0, side - own) / 4 for side, own in zip(sides, image.shape[-2:], strict=True))
        ids.append(krea2_ids(image, index, (down, right) if scheme.fitted else (0, 0)))
    tokens, places = torch.cat([pack(image) for image in images], dim=1), torch.cat(ids)
    others = 0  # text tokens and the target's

    def append(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal others
        target, known = kwargs["hidden_states"], kwargs["position_ids"]
        others = len(known)
        joined = torch.cat([target, tokens.to(target)], dim=1)
        return args, kwargs | {"hidden_states": joined, "position_ids": torch.cat([known, places.to(known)])}

    def cut(_: nn.Module, args: Any, output: tuple[Tensor]) -> tuple[Tensor]:
        return (output[0][:, : -tokens.shape[1]],)

    def modulate(projection: nn.Module, args: Any, output: Tensor) -> Tensor:
        start = transformer.time_embed(output.new_zeros(len(output)), dtype=args[0].dtype)
        clean = projection.forward(F.gelu(start, approximate="tanh"))
        return torch.cat([output.expand(-1, others, -1), clean.expand(-1, tokens.shape[1], -1)], dim=1)

    hooks = [
        transformer.register_forward_pre_hook(append, with_kwargs=True),
        transformer.register_forward_hook(cut),
        *([transformer.time_mod_proj.register_forward_hook(modulate)] if scheme.clean else []),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def krea2_velocity(transformer: Any, x_t: Tensor, t: Tensor, prompt: Mapping[str, Tensor]) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,)."""
    embeds = prompt["prompt_embeds"]
    return predict_target(
        transformer,
        [x_t],
        timestep=t,
        encoder_hidden_states=embeds,
        encoder_attention_mask=padding_mask(prompt, x_t.device),
        position_ids=F.pad(krea2_ids(x_t), (0, 0, embeds.shape[1], 0)),
    )
