"""Encoding data.root into the cache, for the tasks that read it."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from callbacks.best_effort import best_effort
from callbacks.peers import peers
from callbacks.signals import Stopped
from datamodules.errors import UserError
from tasks.placement import frozen_model
from tasks.terminal import log, silence_libraries

if TYPE_CHECKING:
    import lightning.pytorch as L

    from datamodules.cached import CachedDataModule


def cached_data(cfg: DictConfig) -> "CachedDataModule":
    """The data of a task that is about data.root.

    Raises:
        UserError: the settings name other data.
    """
    from hydra.utils import instantiate

    from datamodules.cached import CachedDataModule

    data = instantiate(cfg.data, _convert_="all")
    silence_libraries()
    if not isinstance(data, CachedDataModule) or data.shards is not None:
        raise UserError(f"task={cfg.task} is about data.root: leave data=cached and data.shards as they are")
    return data


def build_cache(cfg: DictConfig, data: "CachedDataModule") -> Path:
    """Encode the samples of data.root that are missing from the cache; returns its folder."""
    from hydra.utils import instantiate

    from callbacks.graceful_stop import GracefulStop
    from callbacks.progress import EncodingProgress
    from callbacks.shard_writer import ShardWriter
    from datamodules.contents import is_complete
    from datamodules.encoding import EncodingDataModule

    module = frozen_model(cfg, sampling=None)  # without sampling no transformer is loaded
    data.configure_for(module)
    cache = data.cache(module)
    writer = ShardWriter(cache, data.shard_size)
    # Every process loads complete encoders, even where the transformer will be split.
    strategy = cfg.trainer.strategy if isinstance(cfg.trainer.strategy, str) else "ddp"
    callbacks = [writer, EncodingProgress(line_every=10), GracefulStop()]
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=True,
        profiler=None,  # it is about training
    )
    peers.follow(trainer)
    with cache.lock() if trainer.is_global_zero else contextlib.nullcontext():
        if trainer.world_size == 1:
            cache.recover()
            if is_complete(data.sample_set, cache, data.preserve_prompts) and not cache.unmerged():
                return cache.folder
        try:
            to_encode = EncodingDataModule(data.sample_set, data.num_workers, cache, data.preserve_prompts)
            trainer.predict(module, to_encode, return_predictions=False)
        except Stopped as stopped:
            stopped.add_note(f"the same command continues with what is encoded in {cache.folder}")
            raise
        if trainer.is_global_zero and writer.added:
            log.info(f"encoded {writer.added} prompts more for samples that were there, for objective.preserve.prompts")
        if trainer.is_global_zero and writer.encoded:
            data.open(cache)
            log.info(f"encoded {writer.encoded} samples; look at them: {cache.folder / 'preview.png'}")
            with best_effort("preview.png"):
                from tasks.contact_sheet import write_contact_sheet

                write_contact_sheet(data, cache.folder / "preview.png")
    return cache.folder
