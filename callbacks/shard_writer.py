"""Encoded samples to shards: building a cache is trainer.predict with this callback."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.encoding import EncodeRequest
from datamodules.shards.cache import Cache
from datamodules.shards.tar import OpenShard, prompt_id
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import ProgressLines

# Bytes at which a new tar begins.
SHARD_SIZE = 2**29


class ShardWriter(L.Callback):
    """Appends each sample to a tar of this process's rank as soon as it is encoded.

    Args:
        cache: the destination.

    Attributes:
        encoded: number of samples that this process has encoded.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.encoded = 0
        self._shard: OpenShard | None = None

    def on_predict_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self._progress = ProgressLines(int(trainer.num_predict_batches[0]), "samples encoded")

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: EditModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        if self._shard is not None and self._shard.size >= SHARD_SIZE:
            self.cache.seal(self._shard)
            self._shard = None
        if self._shard is None:
            self._shard = self.cache.new_shard(trainer.global_rank)
        write_sample(self._shard, pl_module, batch, *outputs)
        self.encoded += 1
        self._progress.done(self.encoded)

    def on_predict_end(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if self._shard is not None:
            self.cache.seal(self._shard)


def write_sample(
    shard: OpenShard,
    module: EditModule,
    request: EncodeRequest,
    latents: LatentBatch,
    prompts: Sequence[dict[str, Tensor]],
) -> None:
    """Append a sample to a tar, after the prompts that the tar lacks.

    Args:
        prompts: the conditioning of the captions and of the preserved prompts, (1, L, ...) each.
    """
    images = request.images if module.condition_images.text_sees_them else []
    text = module.geometry.text

    def add(kind: str, prompt: str, tensors: dict[str, Tensor]) -> str:
        id, prefix = prompt_id(kind, prompt, images), kind.removesuffix("prompt")
        if id not in shard.ids:
            facts = {"caption": prompt, "text_tokens": tensors[text].shape[1]}
            shard.add(id, {prefix + name: tensor[0].cpu() for name, tensor in tensors.items()}, facts)
        return id

    texts = (*request.captions, *request.preserved)
    ids = [add("prompt", *one) for one in zip(texts, prompts, strict=True)]
    raw, own = request.raw, len(request.captions)
    seen = [image for image in (raw.target, *raw.controls) if image is not None]
    longest = max(prompts[:own], key=lambda one: one[text].shape[1])
    facts = {
        "key": raw.keys[0],
        "view": request.view,
        "captions": request.captions,
        "prompts": ids[:own],
        "empty_prompt": add("empty_prompt", "", latents.empty_prompt),
        "sizes": [[image.shape[-1], image.shape[-2]] for image in seen],
        "mask": raw.mask is not None,
        **({} if raw.rejected is None else {"rejected": True}),
        "tokens": module.geometry.token_count(replace(latents, prompt=longest)),
    }
    shard.add(request.id, dict(_tensors(latents, module.encoder.vae_encode_mode == "sample")), facts)


def _tensors(latents: LatentBatch, with_std: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a sample's tensors by name, without the batch dimension, on the CPU."""
    for name in ("target_mean", "target_std", "rejected_mean", "rejected_std"):
        tensor = getattr(latents, name)
        if tensor is not None and (with_std or name.endswith("_mean")):
            yield name, tensor[0].cpu()
    for number, control in enumerate(latents.controls):
        yield f"control_{number}", control[0].cpu()
    if latents.mask is not None:
        yield "mask", (latents.mask[0] * 255).round().byte().cpu()
