"""Latents as a transformer's tokens: 2x2 patches."""

from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """(B, C, 2H, 2W) -> (B, H*W, 4C), each token one 2x2 patch."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, H*W, 4C) -> (B, C, 2H, 2W), where `height` = 2H and `width` = 2W are the latent's sides."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)
