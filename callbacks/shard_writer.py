"""Encoded samples to shards: building a cache is trainer.predict with this callback."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import BasePredictionWriter
from rich.filesize import decimal
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.encoding import EncodeRequest, EncodingDataModule
from datamodules.shards.cache import Cache
from datamodules.shards.tar import OpenShard, prompt_id
from lightning_modules.edit_module import EditModule

log = logging.getLogger("retouch")


class ShardWriter(BasePredictionWriter):
    """Appends each sample to a tar of this process's rank as soon as it is encoded.

    Args:
        cache: the cache that is filled.
        shard_size: bytes at which a tar is full.

    Attributes:
        encoded: number of samples that this process has encoded.
        added: number of prompts that it has encoded for samples that were there already.
    """

    def __init__(self, cache: Cache, shard_size: int) -> None:
        super().__init__(write_interval="batch")
        self.cache = cache
        self.shard_size = shard_size
        self.encoded = self.added = 0
        self._shard: OpenShard | None = None

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: EncodeRequest,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert isinstance(pl_module, EditModule)
        self._write(trainer.global_rank, pl_module, batch, *prediction)
        self.encoded += batch.is_new
        self.added += 0 if batch.is_new else len(batch.texts)
        if batch_idx == 0 and trainer.is_global_zero and self.cache.on_disk:
            data = EncodingDataModule.of(trainer)
            items = data.requests.items
            new = sum(one.is_new for one in items)
            own = sum(len(one.preserved) + (1 + len(one.view.sample.prompts) if one.is_new else 0) for one in items)
            prompts = own if pl_module.condition_images.text_sees_them else len(data.all_prompts())
            self._compare_with_free_space(new * trainer.world_size, prompts * trainer.world_size)

    def _write(
        self,
        rank: int,
        module: EditModule,
        request: EncodeRequest,
        latents: LatentBatch | None,
        prompts: Sequence[dict[str, Tensor]],
    ) -> None:
        if self._shard is None or self._shard.size >= self.shard_size:
            if self._shard is not None:
                self.cache.seal(self._shard)
            self._shard = self.cache.open_shard(rank, self.shard_size)
        shard = self._shard
        images = request.images if module.condition_images.text_sees_them else []
        raw = request.raw

        def add(kind: str, text: str, tensors: dict[str, Tensor]) -> str:
            id, prefix = prompt_id(kind, text, images), kind.removesuffix("prompt")
            if id not in shard.ids:
                shard.add(id, {prefix + name: tensor[0].cpu() for name, tensor in tensors.items()}, {"caption": text})
            return id

        members = [add("prompt", *one) for one in zip(request.texts, prompts, strict=True)]
        if latents is None:
            return
        own = len(request.captions)
        seen = [image for image in (raw.target, *raw.controls) if image is not None]
        longest = max(prompts[:own], key=lambda one: one[module.geometry.text].shape[1])
        facts = {
            "key": raw.keys[0],
            "view": request.view,
            "captions": request.captions,
            "prompts": members[:own],
            "empty_prompt": add("empty_prompt", "", latents.empty_prompt),
            "sizes": [[image.shape[-1], image.shape[-2]] for image in seen],
            "mask": raw.mask is not None,
            **({} if raw.rejected is None else {"rejected": True}),
            "tokens": module.geometry.token_count(replace(latents, prompt=longest)),
        }
        shard.add(request.id, dict(_tensors(latents, module.encoder.vae_encode_mode == "sample")), facts)

    def _compare_with_free_space(self, samples: int, prompts: int) -> None:
        """Say now what would stop the build hours later."""
        assert self._shard is not None
        prompt, sample = self._shard.rows[0]["bytes"], self._shard.rows[-1]["bytes"]
        needed, free = samples * sample + prompts * prompt, shutil.disk_usage(self.cache.folder).free
        if needed > free:
            log.warning(
                f"note: {samples} samples and {prompts} prompts like the first need {decimal(needed)}, "
                f"{self.cache.folder} has "
                f"{decimal(free)} free"
            )

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._shard is not None:
            self.cache.seal(self._shard)


def _tensors(latents: LatentBatch, with_std: bool) -> Iterator[tuple[str, Tensor]]:
    """A sample's own members, without the batch dimension."""
    assert latents.target_mean is not None
    yield "target_mean", latents.target_mean[0].cpu()
    if with_std and latents.target_std is not None:
        yield "target_std", latents.target_std[0].cpu()
    if latents.rejected_mean is not None:
        yield "rejected_mean", latents.rejected_mean[0].cpu()
    if with_std and latents.rejected_std is not None:
        yield "rejected_std", latents.rejected_std[0].cpu()
    for number, control in enumerate(latents.controls):
        yield f"control_{number}", control[0].cpu()
    if latents.mask is not None:
        yield "mask", (latents.mask[0] * 255).round().byte().cpu()
