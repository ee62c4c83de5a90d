"""task=fit: build everything from the composed config, train, and report the result."""

import contextlib
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from callbacks import find_callback
from callbacks.checkpointing import RaiseCheckpointing
from callbacks.lifecycle import GracefulStop, SaveConfig, StartOfTraining, Watchdog
from callbacks.loggers import alert
from callbacks.metrics import Metrics
from callbacks.validation import Validation
from cli.arguments import NOTIFY
from cli.hub_upload import push_to_hub
from cli.placement import place_trainer, require_card
from cli.resolvers import CONF
from cli.resuming import Start, find_start, start_again
from cli.terminal import is_first_process, line_for_users, log, silence_libraries
from datamodules.cached import CachedDataModule
from datamodules.pairs import PairsDataModule
from foundation.errors import UserError
from foundation.files import link_below
from foundation.internals import train_without_steps
from report.commands import predict_command
from report.images import last_strips
from report.quoting import without_secrets
from runs.run_folder import End, RunFolder
from runs.signals import Stopped, stop
from tasks.encode import build_cache


def fit(cfg: DictConfig, output_dir: Path) -> float:
    """Train, and return the monitored value, by which a sweep compares."""
    run = RunFolder(output_dir)
    with no_output_unless_started(run):
        settings = run_settings(cfg)
        start = find_start(cfg, run, settings)
        if (end := start.end) is not None:
            how = "was stopped early; early_stopping=false resumes it" if end.stopped_early else "is finished"
            log.info(f"nothing to do: {run} {how}, at step {end.step} of trainer.max_steps={cfg.trainer.max_steps}")
            return end.value
        # Before the cache is built: a logger's library may be missing.
        loggers = [instantiate(logger) for logger in (cfg.logger or {}).values() if logger is not None]
        with announced(run, os.environ.get(NOTIFY, OmegaConf.select(cfg, "notify")), loggers):
            trainer = train(cfg, run, settings, start, loggers)
            repository = OmegaConf.select(cfg, "hub.push")
            if repository is not None and trainer.is_global_zero:  # after the run, whose other processes would wait
                module: Any = trainer.lightning_module
                push_to_hub(run, module.adapter.folder, repository, cfg.hub.private)
            end = report(trainer, run, cfg)
            if trainer.is_global_zero:
                run.write_end(end)
        return end.value


def train(cfg: DictConfig, run: RunFolder, settings: dict[str, Any], start: Start, loggers: list[Any]) -> L.Trainer:
    """Return the trainer after its last step; `settings` becomes the content of config.yaml."""
    # Before Hydra's instantiate, which resolves interpolations in place.
    resolved = OmegaConf.to_container(cfg, resolve=True)
    place_trainer(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    # Plain lists and dicts: a checkpoint must load without this project's libraries.
    data = instantiate(cfg.data, _convert_="all")
    if data.sample_set.roots:
        data.sample_set.scan()  # its mistakes are reported before the hub is queried
    require_card(cfg)
    module = instantiate(cfg.model, _convert_="all")
    # Before the cache is built: an image of sample_root may be missing.
    configured = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    silence_libraries()
    if isinstance(data, CachedDataModule) and data.shards is None:
        check_samples(module, data)
        build_cache(cfg, data)
    first = [StartOfTraining(), Watchdog(cfg.watchdog_minutes)]
    last = [RaiseCheckpointing(), SaveConfig(run, settings, resolved), GracefulStop(run)]
    trainer: L.Trainer = instantiate(
        cfg.trainer, callbacks=[*first, *configured, *last], logger=loggers, default_root_dir=run.path
    )
    if start.step >= trainer.max_steps:  # killed after its last checkpoint: its last images and report are missing
        train_without_steps(trainer)
    if is_first_process() and not run.checkpoint.is_file():
        start_again(run)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
    except Stopped as stopped:  # by a second signal, which does not wait for a checkpoint
        saved = run.checkpoint.is_file()
        how = "by the same command" if cfg.resume else "with ckpt_path=last"
        stopped.add_note(f"resume from the last checkpoint {how}" if saved else "nothing to save")
        raise
    return trainer


def check_samples(module: Any, data: PairsDataModule) -> None:
    """Raise a UserError for a model or for samples that it cannot learn from, before anything is encoded."""
    data.sample_set.require_root()
    module.check()
    data.configure_for(module)
    samples = data.sample_set.find().samples
    module.objective.check_samples([one for one in samples if not data.sample_set.is_held_out(one)])


def run_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the content of config.yaml: the composed config as a primary config, with its interpolations.

    A run is repeated from it by `python train.py -cp RUN -cn config output_dir=NEW`.
    """
    primary: Any = OmegaConf.load(CONF / "train.yaml")
    del primary.hydra.help
    primary.hydra.runtime = {"choices": HydraConfig.get().runtime.choices}  # for the page, to start the run again
    hydra_defaults = [entry for entry in primary.defaults if str(entry).startswith("{'override")]
    settings: Any = OmegaConf.to_container(cfg)
    settings["ckpt_path"] = settings["resume"] = settings["notify"] = None
    return {"defaults": ["_self_", *hydra_defaults], **settings, "hydra": OmegaConf.to_container(primary.hydra)}


def report(trainer: L.Trainer, run: RunFolder, cfg: DictConfig) -> End:
    """Log the quality of the model and the places of the output; return the end of the run."""
    if run.checkpoint.is_file():
        more = "" if cfg.resume else f" and output_dir={shlex.quote(str(run))} ckpt_path=last"
        stop.check(f"after step {trainer.global_step}, saved in {run}; resume with the same command{more}")
    stop.check("before the first step: nothing to save")
    metrics, validation = find_callback(trainer, Metrics), find_callback(trainer, Validation)
    module: Any = trainer.lightning_module
    kind = module.adapter.folder
    if metrics is not None and not metrics.latest:
        log.info(f"nothing to do: {run} is at step {trainer.global_step}, trainer.max_steps={trainer.max_steps}")
    if validation is not None and validation.rows:
        log.info(validation.summary())
    if run.report.is_file():
        log.info(f"look at it: {run.report}")
    for line in [] if validation is None else validation.best_lines(str(run.path / kind)):
        log.info(line)
    if validation is not None and metrics is not None and (failure := validation.failure(metrics.losses)):
        log.warning(f"note: {failure}")
    log.info(f"done: {run.weights(kind, 'last')}")
    sample = next(last_strips(run), None)
    weights = module.adapter.predict_arguments(str(run), cfg.model_name)
    settings = {"prompt": sample.prompt[:200] + "..." * (len(sample.prompt) > 200) if sample else "..."}
    log.info(f"try it: {predict_command(module, weights, settings, list(map(str, run.controls())), sample)}")
    monitor = cfg.monitor or (validation.monitor if validation is not None and validation.rows else "loss_avg")
    measured = {**(metrics.latest if metrics else {}), **(validation.measured() if validation else {})}
    if trainer.is_global_zero and monitor not in measured and metrics is not None and metrics.latest:
        log.warning(f"note: monitor={monitor} has no value for these samples; there are {', '.join(measured)}")
    return End(
        trainer.global_step,
        measured.get(monitor, math.nan),  # only the first process measures
        monitor,
        more_is_better=validation is not None and bool(validation.directions.get(monitor)),
        stopped_early=validation is not None and validation.stopped_early,
    )


@contextlib.contextmanager
def announced(run: RunFolder, addresses: Any, loggers: list[Any]) -> Iterator[None]:
    """Temporarily watch a run; then alert the loggers, and send a message with grid.png by apprise."""
    services = None
    if addresses:
        try:
            import apprise
        except ImportError as error:
            raise UserError("notify needs apprise. Run pip install 'retouch[notify]'.") from error
        apprise.logger.disabled = True  # its lines contain addresses
        services = apprise.Apprise()
        if not services.add(addresses if isinstance(addresses, str) else list(addresses)):
            raise UserError("notify: apprise does not know an address. Choose from https://appriseit.com/services/.")
    how, level, text = "is finished", "info", ""
    try:
        yield
        if (end := run.read_end(0, early_stopping=True)) is not None:
            text = f"{end.monitor} {end.value:.4g} at step {end.step}"
    except BaseException as error:
        how, level = ("was stopped", "warn") if isinstance(error, Stopped) else ("failed", "error")
        text = without_secrets(line_for_users(error) or f"{type(error).__name__}: {error}")
        raise
    finally:
        if is_first_process():
            title = f"{'/'.join(run.path.parts[-2:])} {how}"
            grid = str(run.grid) if run.grid.is_file() and not link_below(run.path, run.grid) else None
            alert(loggers, title, level, text=text)
            for sent in services.notify(text or title, title, attach=grid) if services else ():
                if not sent:
                    log.warning(f"note: {sent.name} did not accept the notification")


@contextlib.contextmanager
def no_output_unless_started(run: RunFolder) -> Iterator[None]:
    """Remove the output of a run that ends before its config.yaml is written, unless the folder had some before."""
    fresh = is_first_process() and not any(path.exists() for path in run.leftovers())
    try:
        yield
    finally:
        if fresh and not run.config.exists():
            with contextlib.suppress(OSError):  # a logger may still write; the run's own error counts
                run.remove_leftovers()
