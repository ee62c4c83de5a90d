"""Encoding data.root into the cache, for the tasks that read it."""

import hashlib
import json
import math
import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from callbacks.best_effort import best_effort
from callbacks.signals import Stopped
from datamodules.errors import UserError, count_of
from tasks.folders import by_one_process
from tasks.placement import Processes, frozen_model, start_processes
from tasks.terminal import is_first_process, log, silence_libraries

if TYPE_CHECKING:
    import lightning.pytorch as L

    from datamodules.cached import CachedDataModule
    from datamodules.shards.cache import Cache

PLAN = "plan.json"
# Samples of a unit of work: at least where several processes share the work, and at most.
LEAST, MOST = 16, 256
# More units would be many small files.
UNITS = 2048


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
    data.sample_set.scan()  # what is wrong with it comes before questions to the hub
    return data


def build_cache(cfg: DictConfig, data: "CachedDataModule") -> "Cache":
    """Encode the samples of data.root that are missing from the cache, by all processes; returns it."""
    module = frozen_model(cfg, sampling=None)  # without sampling no transformer is loaded
    data.configure_for(module)
    cache = data.cache(module)
    what = "task=cache" if cfg.task == "cache" else cfg.output_dir
    usable = cache.touch(f"{what} (data.root={', '.join(map(str, data.roots))})" if is_first_process() else None)
    if not cache.on_disk:
        _hash_here(data, cache)
    if usable:
        try:
            CacheBuild(cfg, data, module, cache, start_processes(cfg)).run()
        except Stopped as stopped:
            stopped.add_note(f"the same command continues with what is encoded in {cache}")
            raise
    return cache


def _hash_here(data: "CachedDataModule", cache: "Cache") -> None:
    """Let one process of this machine compute the checksums of all samples' files; elsewhere their times differ."""
    from datamodules.encoding import hash_files
    from datamodules.shards.processes import new_name

    def hash_all() -> None:
        hash_files(cache, new_name(), data.sample_set.find())
        cache.checksums.merge()

    by_one_process(cache.folder / "hashing", hash_all)


class CacheBuild:
    """The building of a cache by this process, which takes units of the work in turn with all others that do.

    Args:
        data: the samples, configured for the model.
        module: the model, without its transformer.
        cache: of what it encodes.
        processes: of this command.
    """

    def __init__(
        self, cfg: DictConfig, data: "CachedDataModule", module: Any, cache: "Cache", processes: Processes
    ) -> None:
        self.cfg = cfg
        self.data = data
        self.module = module
        self.processes = processes
        self.cache = cache
        self.leases = cache.leases()
        self.samples = data.sample_set.find()
        keys = [one.key for one in self.samples]
        asked = [keys, *map(str, (data.preserve_prompts, data.sample_set.framing))]
        self.work = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        self._encoded = self._added = 0
        self._notes: list[Any] = []
        self._said = False

    def run(self) -> None:
        """Until all is encoded and in the index."""
        while not self._take_part():
            if self.leases.others():
                self._wait()
        if is_first_process() and (self._encoded or self._added or self.processes.count > 1):
            self._report(sum(encoded for encoded, _ in self._notes), sum(added for _, added in self._notes))

    def _take_part(self) -> bool:
        """Whether this process has taken part in the present round: it may be over, or of other samples."""
        with self.leases.working(self._wait):
            mine = bool(self.leases.open(["merge"]))
            if mine:
                self.leases.once("prepare", self._prepare, self._wait)
                plan = self._plan()
                if plan is None:
                    self.leases.close()
                    where = f"{self.leases.here}/{PLAN}"
                    raise UserError(f"{where} is damaged: start again, and the build is planned anew")
                mine = plan["work"] == self.work
                units = self._units(plan["unit"], plan["count"])
            if mine:
                self._work(units)
                notes = self.leases.notes("encoded-")
                self._notes = [one for one in notes if isinstance(one, list) and len(one) == 2]
                self.leases.once("merge", self._merge, self._wait)
        # What a build of other samples has left that was killed, the next round recovers.
        self.leases.close()
        return mine

    def _work(self, units: dict[str, slice]) -> None:
        """Encode units until all are done."""
        while open := self.leases.open(units):
            # Half of this process's share: the last units are taken one by one, so that all end together.
            taken = self.leases.take(open, math.ceil(len(open) / (2 * self.processes.count)))
            if taken:
                self._encode({name: units[name] for name in taken}, taken, len(open))
            else:
                self._wait()

    def _plan(self) -> dict[str, Any] | None:
        """What is encoded at present, and how it is divided; None where that is nothing, or damaged."""
        plan = self.leases.read(PLAN)
        kinds = {"work": str, "unit": int, "count": int}
        if not isinstance(plan, dict) or any(not isinstance(plan.get(key), kind) for key, kind in kinds.items()):
            return None
        if plan["work"] == self.work and plan["count"] not in (0, len(self.samples)):
            return None
        return plan

    def _wait(self) -> None:
        if not self._said:
            log.info(f"another process is filling {self.cache}: waiting for it")
            self._said = True
        time.sleep(self.leases.root.look)

    def _prepare(self) -> None:
        """By one process: make the index agree with the tars, and divide the work, if there is any."""
        from datamodules.contents import is_complete

        self.cache.recover()
        data, count = self.data, len(self.samples)
        complete = is_complete(data.sample_set, self.cache, data.preserve_prompts) and not self.cache.unmerged()
        shared = self.processes.count > 1
        unit = min(MOST, max(LEAST, math.ceil(count / (8 * self.processes.count)))) if shared else MOST
        unit = max(unit, math.ceil(count / UNITS))
        self.leases.write(PLAN, {"work": self.work, "unit": unit, "count": 0 if complete else count})

    def _units(self, size: int, count: int) -> dict[str, slice]:
        """By name the places of the samples."""
        from datamodules.shards.leases import unit_name

        return {unit_name(n): slice(n * size, (n + 1) * size) for n in range(math.ceil(count / size))}

    def _encode(self, units: dict[str, slice], silent: dict[str, bool], open: int) -> None:
        """Encode what is missing of these units.

        Args:
            silent: of each whether an earlier holder may still write.
            open: of how many units these are.
        """
        from hydra.utils import instantiate

        from callbacks.graceful_stop import GracefulStop
        from callbacks.progress import EncodingProgress
        from callbacks.shard_writer import ShardWriter
        from callbacks.watchdog import Watchdog
        from datamodules.encoding import EncodingDataModule

        data, leases = self.data, self.leases
        leases.require_mine()
        self.cache.recover_units({int(name): silent[name] for name in units})
        writer = ShardWriter(self.cache, data.shard_size, leases, len(units) / open, (self._encoded, self._added))
        watchdog = Watchdog(self.cfg.get("watchdog_minutes"))
        callbacks = [watchdog, writer, EncodingProgress(line_every=10), GracefulStop(self.processes.signal)]
        trainer: L.Trainer = instantiate(
            self.cfg.trainer,
            **self.processes.alone(),
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=True,
            profiler=None,  # it is about training
        )
        numbered = {int(name): places for name, places in units.items()}
        others = leases.me, self.processes.local_count, data.preserve_prompts
        missing = EncodingDataModule(data.sample_set, data.num_workers, self.cache, numbered, *others)
        trainer.predict(self.module, missing, return_predictions=False)
        self._encoded, self._added = writer.encoded, writer.added
        for name in units:
            leases.finish(name)

    def _merge(self) -> None:
        """By one process, when all is encoded."""
        before = self.cache.sample_ids()
        self.cache.recover()
        self.leases.require_mine()
        self.cache.merge()
        if lost := before - self.cache.sample_ids():
            self.cache.refresh()  # another command may have brought here what the bucket had a moment ago
            lost = before - self.cache.sample_ids()
        if lost:
            self.leases.close()
            raise UserError(
                f"{self.cache}: tars of the build that was interrupted have been damaged since, and {len(lost)} "
                "samples are lost: start again, and they are encoded again"
            )

    def _report(self, encoded: int, added: int) -> None:
        if added:
            what = count_of(added, "prompts more for samples that were there, for objective.preserve.prompts")
            log.info(f"encoded {what}")
        if encoded:
            self.data.open(self.cache)
            preview = self.cache.folder / "preview.png"
            log.info(f"encoded {count_of(encoded, 'samples')}; look at them: {preview}")
            with best_effort("preview.png"):
                from tasks.contact_sheet import write_contact_sheet

                write_contact_sheet(self.data, preview)
