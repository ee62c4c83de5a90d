"""Encoding data.root into the cache, for the tasks that read it."""

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from callbacks.lifecycle import GracefulStop, Watchdog
from callbacks.shard_writer import ShardWriter
from cli.placement import frozen_model
from cli.terminal import log, silence_libraries
from datamodules.cached import CachedDataModule
from datamodules.encoding import EncodingDataModule
from datamodules.shards.cache import FINGERPRINT, Cache
from foundation.errors import UserError, count_of, without_credentials
from report.images import write_figure
from runs.run_folder import best_effort
from runs.shares import of_all, of_first
from runs.signals import Stopped


def cached_data(cfg: DictConfig) -> CachedDataModule:
    """Return the data of a task on data.root.

    Raises:
        UserError: the settings name other data.
    """
    data = instantiate(cfg.data, _convert_="all")
    silence_libraries()
    if not isinstance(data, CachedDataModule) or data.shards is not None:
        raise UserError(f"task={cfg.task} works on data.root. Leave data=cached and data.shards as they are.")
    data.sample_set.scan()  # its errors come before questions to the hub
    return data


def build_cache(cfg: DictConfig, data: CachedDataModule) -> Cache:
    """Encode the samples of data.root that the cache lacks, in all processes; return the cache.

    Raises:
        UserError: the cache is in a bucket, and the task would read it.
    """
    module = frozen_model(cfg)
    module.samples = False  # no transformer is loaded
    data.configure_for(module)
    cache = data.cache(module)
    if not cache.on_disk and cfg.task != "cache":
        place = without_credentials(data.cache_dir.rstrip("/"))
        raise UserError(
            f"data.cache_dir={place}: only predict.py task=cache fills a cache in a bucket. Train on it with "
            f"data.shards={place}/{FINGERPRINT} instead of data.root and data.cache_dir."
        )
    if cache.touch():
        try:
            _encode_missing(cfg, data, module, cache)
        except Stopped as stopped:
            stopped.add_note(f"the same command continues; the samples encoded so far are in {cache}")
            raise
    return cache


def _encode_missing(cfg: DictConfig, data: CachedDataModule, module: Any, cache: Cache) -> None:
    """Encode each process's share, and merge the index in the first process."""
    writer = ShardWriter(cache)
    trainer = instantiate(
        cfg.trainer,
        strategy=cfg.trainer.strategy if isinstance(cfg.trainer.strategy, str) else "ddp",
        callbacks=[Watchdog(cfg.get("watchdog_minutes")), writer, GracefulStop()],
        logger=False,
        profiler=None,  # it profiles training
    )
    missing = EncodingDataModule(data.sample_set, data.num_workers, cache, data.preserve_prompts)
    try:
        trainer.predict(module, missing, return_predictions=False)
        counts = of_all(trainer, [writer.encoded])  # all tars are finished
        if trainer.is_global_zero:
            cache.merge()
    finally:
        cache.end()
    of_first(trainer, None)  # the index is merged
    if trainer.is_global_zero:
        _report(data, cache, sum(counts))


def _report(data: CachedDataModule, cache: Cache, encoded: int) -> None:
    if not encoded:
        return
    preview = cache.folder / "preview.png"
    log.info(f"encoded {count_of(encoded, 'samples')}" + (f"; look at them: {preview}" if cache.on_disk else ""))
    if cache.on_disk:
        data.open(cache)
        with best_effort("preview.png"):
            from tasks.contact_sheet import contact_sheet  # imports matplotlib

            write_figure(contact_sheet(data), preview)
