"""Encoding of pixels and prompts: the only way from a RawBatch to a LatentBatch."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from datamodules.batch import ON_HOST, LatentBatch, PromptRequest, RawBatch, copy_to, stack_padded
from datamodules.encoding import EncodeRequest
from datamodules.images.decoding import PREPROCESSING
from foundation.notes import note_once
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.timing import ProgressLines, StageTimer


class Encoder:
    """The frozen encoders of a base, and its decoder.

    Args:
        vae_encode_mode: as in `FlowMatching`; a cache contains the standard deviation for `sample` only.

    Attributes:
        trains_text_encoders: whether text encoders train, so that they encode in every step.
    """

    def __init__(self, family: Family, base: FrozenBase, vae_encode_mode: str) -> None:
        self.family = family
        self.base = base
        self.vae_encode_mode = vae_encode_mode
        self.trains_text_encoders = False
        self.prompts = PromptCache(self._encode_prompt, base.timer)

    def _encode_prompt(self, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        counted = self.family.prompt_tokens(self.base.components, [prompt])
        if counted is not None and counted[0][0] > counted[1]:
            [tokens], most = counted
            where = " (model.max_sequence_length)" if self.family.max_sequence_length else ""
            note_once(f'{tokens} tokens are cut to {most}{where}: "{prompt[:60]}..."')
        return self.family.encode_prompt(self.base.components, prompt, images)

    @torch.no_grad()
    def __call__(self, batch: RawBatch, negative_prompt: str | None = None) -> LatentBatch:
        """Run the frozen encoders; deterministic, so the result may be cached.

        Args:
            negative_prompt: to encode as the batch's `empty_prompt`; "" in training.
        """
        base, target_mean, target_std = self.base, None, None
        with torch.autocast(base.device.type, enabled=False):
            with base.timer.stage("encode_image"):
                if batch.target is not None:
                    target_mean, target_std = self._encode_pixels(batch.target)
                controls = [self._encode_pixels(control)[0] for control in batch.controls]
                rejected = (None, None) if batch.rejected is None else self._encode_pixels(batch.rejected)
            base.offload_to_cpu()
            images = batch.prompt_images
            prompt, empty, preserved = self.prompts(batch.prompts, images, base.device), {}, {}
            if batch.preserve_prompts:
                preserved = self.prompts(batch.preserve_prompts, images, base.device)
            if negative_prompt is not None:
                empty = self.prompts([negative_prompt] * len(images), images, base.device)
        base.offload_to_cpu()
        return LatentBatch(
            batch.keys,
            batch.draws,
            target_mean,
            target_std,
            controls,
            prompt,
            empty,
            batch.mask,
            batch.prompts,
            batch.weights,
            preserved,
            rejected_mean=rejected[0],
            rejected_std=rejected[1],
            dropped=batch.dropped,
            has_first=batch.has_first,
        )

    @torch.no_grad()
    def to_cache(self, request: EncodeRequest) -> tuple[LatentBatch, list[dict[str, Tensor]]]:
        """Return a view encoded with the empty prompt, and the conditioning of its captions and preserved prompts."""
        latents, images, device = self(request.raw, ""), request.raw.prompt_images, self.base.device
        with torch.autocast(device.type, enabled=False):
            return latents, [self.prompts([text], images, device) for text in (*request.captions, *request.preserved)]

    def _encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) in [-1, 1] -> mean and std of the latent, on the transformer's device."""
        parts, device = self.base.components, self.base.device
        vae = parts["vae"]
        # In diffusers' memory layout, since rounding of bf16 kernels depends on it.
        pixels = pixels.to(parts.device("vae"), parts.dtype, memory_format=torch.channels_last)
        mean, std = self.family.encode_pixels(vae, pixels)
        return mean.to(device), std.to(device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents (B, C, h, w) -> pixels (B, C, H, W), about [-1, 1], on the CPU in float32."""
        parts = self.base.components
        return self.family.decode(parts["vae"], latents.to(parts.device("vae"))).float().cpu()

    def latents(self, batch: RawBatch | LatentBatch, empty_prompt: bool) -> LatentBatch:
        """Return the encoded batch of a training step; of a raw one, `empty_prompt` as well if wanted."""
        if isinstance(batch, RawBatch):
            batch = self(batch, "" if empty_prompt else None)
        return self.refresh_prompt_embeds(batch)

    def refresh_prompt_embeds(self, batch: LatentBatch, negative_prompt: str | None = None) -> LatentBatch:
        """Return the batch with the present outputs of text encoders that train; `empty_prompt` is the negative one."""
        if not self.trains_text_encoders:
            return batch
        encode = self.family.encode_prompts
        empty = encode(self.base.components, [negative_prompt or ""]) if batch.empty_prompt else {}
        return replace(batch, prompt=encode(self.base.components, batch.prompts), empty_prompt=empty)

    def fingerprint_parts(self, memo: Path) -> dict[str, Any]:
        """Return everything that encodings depend on besides the samples, for a cache's fingerprint.

        Args:
            memo: a file with known checksums of a local model's files.
        """
        return {
            **self.base.identity(memo),
            "preprocessing": PREPROCESSING,
            "vae_encode_mode": self.vae_encode_mode,
            "settings": self.family.encoding_settings(),
            "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        }


@dataclass(eq=False)
class PromptCache:
    """Prompt embeddings in CPU memory, since data sets for an edit repeat their instructions.

    The key is the text and the pixels of the images that its encoder sees. Each prompt is encoded separately, so that
    its embedding does not depend on others in a batch.

    Args:
        encode: a prompt and its images -> the text conditioning, each tensor (...).
        kept: number of most recently used prompts; 4 MB each for T5-XXL at 512 tokens, 10 MB for Qwen2.5-VL with one
            megapixel.
    """

    encode: Callable[[str, list[Tensor]], dict[str, Tensor]]
    timer: StageTimer
    kept: int = 64
    _seconds: dict[bytes, float] = field(default_factory=dict)
    _encoded: dict[bytes, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(
        self, prompts: Sequence[str], images: Sequence[list[Tensor]], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the conditioning of a batch, each tensor (B, ...), on `device`; masks on the CPU.

        Args:
            images: the images that each prompt's encoder sees.
        """
        encoded = []
        for prompt, seen in zip(prompts, images, strict=True):
            key = _digest(prompt, seen)
            encoded.append(self._encoded.pop(key) if key in self._encoded else self._encode(key, prompt, seen))
            self._encoded[key] = encoded[-1]
        while len(self._encoded) > self.kept:
            del self._encoded[next(iter(self._encoded))]
        stacked = stack_padded(encoded)
        return {k: tensor if k.endswith(ON_HOST) else copy_to(tensor, device) for k, tensor in stacked.items()}

    def seconds(self, prompt: str, images: list[Tensor]) -> float:
        return self._seconds[_digest(prompt, images)]

    def _encode(self, key: bytes, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        before = self.timer.seconds.get("encode_prompt", 0.0)
        with self.timer.stage("encode_prompt"):
            encoded = {name: tensor.cpu() for name, tensor in self.encode(prompt, images).items()}
        self._seconds[key] = self.timer.seconds["encode_prompt"] - before
        return encoded

    @torch.no_grad()
    def keep(
        self, requests: Sequence[PromptRequest], load: Callable[[Sequence[Path]], list[Tensor]], processes: int = 1
    ) -> bool:
        """Encode all prompts if they fit in memory; return whether they do.

        Args:
            load: reads the images of a prompt.
            processes: on this machine, which share half of the free memory.
        """
        progress = ProgressLines(len(requests), "prompts encoded")
        for number, (prompt, paths) in enumerate(requests, 1):
            first = self([prompt], [load(paths)], torch.device("cpu"))
            if number == 1:
                size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
                if size * len(requests) * processes > psutil.virtual_memory().available / 2:
                    return False
                self.kept = max(self.kept, len(requests))
            progress.done(number)
        return True


def _digest(prompt: str, images: list[Tensor]) -> bytes:
    digest = hashlib.sha256(prompt.encode())
    for image in images:
        digest.update(str(tuple(image.shape)).encode())
        digest.update(image.cpu().numpy().tobytes())
    return digest.digest()
