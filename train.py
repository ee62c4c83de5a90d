"""Fine-tune a LoRA: `python train.py --help` tells how."""

import contextlib
import gc
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from callbacks import find_callback, never_costing_the_run
from callbacks.signals import Stopped, stop
from datamodules.errors import UserError
from datamodules.files import replacing
from tasks.folders import LOCK, in_use, shorten
from tasks.resuming import check_resumable, find_checkpoint, start_anew
from tasks.settings import TRAINING, check_settings
from tasks.terminal import (
    command_line,
    end_workers,
    is_first_process,
    log,
    one_line_errors,
    quote_values,
    silence_libraries,
)

if TYPE_CHECKING:
    import lightning.pytorch as L

    from datamodules.cached import CachedDataModule

CONF = Path(__file__).parent / "conf"
PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed"}

OmegaConf.register_new_resolver("precision_for", lambda dtype: PRECISION.get(dtype, "32-true"), replace=True)


def unless_4_bit(usual: float, four_bit: float, *, _root_: DictConfig) -> float:
    """A setting that is another where the base is quantized to 4 bits."""
    chosen = OmegaConf.select(_root_, "model.quantization") or {}
    four = chosen.get("format") in ("fp4", "nf4") and "transformer" in chosen.get("components_to_quantize", ())
    return four_bit if four else usual


OmegaConf.register_new_resolver("unless_4_bit", unless_4_bit, replace=True)
# At most a tenth of a run warms up: a schedule that never comes to its learning rate would learn next to nothing.
OmegaConf.register_new_resolver("warmup_steps", lambda most, max_steps: min(most, max_steps // 10), replace=True)


def place_trainer(cfg: DictConfig) -> None:
    """model.devices.transformer decides where the trainer computes."""
    from lightning_modules.pretrained.repository import resolve_device

    device = cfg.model.devices.transformer
    if resolve_device(device, "model.devices.transformer") is None:
        return
    if cfg.trainer.devices != 1:
        raise UserError(f"model.devices.transformer={device} and trainer.devices={cfg.trainer.devices}: choose one")
    kind, _, index = device.partition(":")
    cfg.trainer.accelerator = {"cuda": "gpu"}.get(kind, kind)
    cfg.trainer.devices = [int(index or 0)] if kind == "cuda" else 1


def run_settings(cfg: DictConfig) -> dict[str, Any]:
    """What config.yaml holds: the composed config as a primary config, its interpolations kept.

    A run is repeated from it by `python train.py -cp RUN -cn config output_dir=NEW`.
    """
    primary: Any = OmegaConf.load(CONF / "train.yaml")
    del primary.hydra.help
    hydra_defaults = [entry for entry in primary.defaults if str(entry).startswith("{'override")]
    settings: Any = OmegaConf.to_container(cfg)
    hydra_settings = OmegaConf.to_container(primary.hydra)
    settings["ckpt_path"] = None
    return {"defaults": ["_self_", *hydra_defaults], **settings, "hydra": hydra_settings}


def build_cache(cfg: DictConfig, data: "CachedDataModule") -> Path:
    """Encode what the cache lacks of data.root; gives its folder."""
    from hydra.utils import instantiate

    from callbacks.graceful_stop import GracefulStop
    from callbacks.progress import EncodingProgress
    from callbacks.shard_writer import ShardWriter
    from datamodules.encoding import EncodingDataModule, lacking
    from tasks.contact_sheet import write_contact_sheet

    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, sampling=None, _convert_="all")
    data.serve(module)
    cache = data.cache(module)
    writer = ShardWriter(cache, data.shard_size)
    # The encoders are whole in every process, also where the transformer will be split.
    strategy = cfg.trainer.strategy if isinstance(cfg.trainer.strategy, str) else "ddp"
    callbacks = [writer, EncodingProgress(line_every=10), GracefulStop()]
    trainer: L.Trainer = instantiate(
        cfg.trainer, strategy=strategy, callbacks=callbacks, logger=False, enable_progress_bar=True
    )
    with cache.lock() if trainer.is_global_zero else contextlib.nullcontext():
        if trainer.world_size == 1:
            cache.recover()
            if not lacking(data.find(), cache) and not cache.unmerged():
                return cache.folder
        try:
            trainer.predict(module, EncodingDataModule(data, cache), return_predictions=False)
        except Stopped as stopped:
            stopped.add_note(f"the same command goes on from what is encoded in {cache.folder}")
            raise
        if trainer.is_global_zero and writer.encoded:
            data.open(cache)
            log.info(f"encoded {writer.encoded} samples; look at them: {cache.folder / 'preview.png'}")
            with never_costing_the_run("preview.png"):
                write_contact_sheet(data, cache.folder / "preview.png")
    return cache.folder


def fit(cfg: DictConfig, output_dir: Path) -> "L.Trainer":
    """Build everything from the composed config and train."""
    import lightning.pytorch as L
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import LambdaCallback

    from callbacks.graceful_stop import GracefulStop
    from datamodules.cached import CachedDataModule

    checkpoint, step = find_checkpoint(cfg.ckpt_path, output_dir) or (None, 0)
    settings = run_settings(cfg)  # before Hydra's instantiate, which resolves interpolations in place
    if checkpoint is not None:
        check_resumable(settings, checkpoint)

    def begin(trainer: L.Trainer) -> None:
        stop.take_over()  # from Lightning, which would leave without saving
        trainer.fit_loop.epoch_loop.max_steps = cfg.trainer.max_steps

    def save_config(trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            with replacing(output_dir / "config.yaml") as temporary:
                OmegaConf.save(OmegaConf.create(settings), temporary)

    place_trainer(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    # Plain lists and dicts: what goes into a checkpoint must load without this project's libraries.
    data = instantiate(cfg.data, _convert_="all")
    module = instantiate(cfg.model, _convert_="all")
    silence_libraries()
    if isinstance(data, CachedDataModule) and data.shards is None:
        data.require_root()
        module.preflight()
        build_cache(cfg, data)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    loggers = [instantiate(logger) for logger in (cfg.logger or {}).values() if logger is not None]
    # Before the report, which shows it; after what may refuse the run.
    callbacks.insert(len(callbacks) - 1, LambdaCallback(on_train_start=lambda trainer, _: save_config(trainer)))
    callbacks.insert(0, LambdaCallback(on_train_start=lambda trainer, _: begin(trainer)))
    callbacks.append(GracefulStop())
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers, default_root_dir=output_dir)
    # A run that was killed behind its last saving has no step left, but an end: Lightning would leave it out.
    trainer.fit_loop.epoch_loop.max_steps = max(cfg.trainer.max_steps, step + 1)
    last = output_dir / "checkpoints" / "last.ckpt"
    if is_first_process() and not last.is_file():
        start_anew(output_dir)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except Stopped as stopped:  # at once
        stopped.add_note("ckpt_path=last goes on from the last saving" if last.is_file() else "nothing to save")
        raise
    return trainer


def report(trainer: "L.Trainer", output_dir: Path, monitor: str | None, model_name: str) -> float:
    """Say how good it is and where things are; gives what a sweep compares."""
    from callbacks.metrics import Metrics
    from callbacks.report.commands import predict_command
    from callbacks.validation import Validation

    if (output_dir / "checkpoints" / "last.ckpt").is_file():
        where = f"after step {trainer.global_step}, saved in {output_dir}"
        stop.check(f"{where}; go on with the same command and output_dir={shlex.quote(str(output_dir))} ckpt_path=last")
    stop.check("before the first step: nothing to save")
    metrics = find_callback(trainer, Metrics)
    if metrics is not None and not metrics.latest:
        log.info(f"nothing to do: {output_dir} is at step {trainer.global_step}, trainer.max_steps={trainer.max_steps}")
    validation = find_callback(trainer, Validation)
    if validation is not None and validation.rows:
        log.info(validation.summary())
    if (output_dir / "report.html").is_file():
        log.info(f"look at it: {output_dir / 'report.html'}")
    module: Any = trainer.lightning_module
    last = output_dir / module.adapter.folder / "last"
    log.info(f"done: {last}")
    log.info(f'try it: {predict_command(module, str(output_dir), model_name, {})} prompt="..."')
    measured = {**(metrics.latest if metrics else {}), **(validation.latest if validation else {})}
    if not trainer.is_global_zero:  # what is measured is measured by the first process
        return float("nan")
    if monitor is None:
        monitor = "val_loss" if "val_loss" in measured else "loss_avg"
    if monitor not in measured and metrics is not None and metrics.latest:
        raise UserError(f"monitor={monitor} was not measured: choose {', '.join(measured)}")
    return measured.get(monitor, float("nan"))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(cfg: DictConfig) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    cfg.output_dir = str(output_dir)
    cfg.model_name = str(cfg.model_name)  # the name itself, for the run's config.yaml
    in_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        with one_line_errors(in_sweep), stop.listening():
            check_settings(cfg, TRAINING)
            if cfg.task == "dry_run":
                from tasks.dry_run import dry_run

                if in_sweep:
                    raise UserError("task=dry_run plans one run: leave -m and the lists out")
                silence_libraries()
                dry_run(cfg)
                return None
            if cfg.task != "fit":
                raise UserError(f"task={cfg.task}: choose fit or dry_run")
            with in_use(output_dir), no_traces_unless_started(output_dir, cfg.data.get("cache_dir")):
                return report(fit(cfg, output_dir), output_dir, cfg.monitor, cfg.model_name)
    finally:
        with contextlib.suppress(OSError):  # not there, or not empty
            output_dir.rmdir()
        end_workers()
        # A sweep's next job loads its own model: let this one's go first.
        gc.collect()


@contextlib.contextmanager
def no_traces_unless_started(output_dir: Path, cache_dir: str | None) -> Iterator[None]:
    """Remove what a run has made in an empty folder, where it ends before it has begun."""
    fresh = is_first_process() and all(path.name == LOCK for path in output_dir.iterdir())
    if cache_dir is not None and Path(cache_dir).expanduser().resolve().is_relative_to(output_dir.resolve()):
        fresh = False  # what is encoded stays
    try:
        yield
    finally:
        if fresh and not (output_dir / "config.yaml").exists():
            shutil.rmtree(output_dir, ignore_errors=True)


def with_examples(arguments: list[str]) -> list[str]:
    """The command line; where it names no model, with the embedded one's settings, and without data its examples."""

    def names(*keys: str) -> bool:
        return any(one.startswith(keys) and one != "model=embedded" for one in arguments)

    own_config = names("-cp", "-cn", "-cd", "--config")
    if own_config or names("experiment=", "model=", "model.pretrained_model_name_or_path="):
        return arguments
    # What only shows the settings shows those that one's own data would get.
    own_data = names("data=", "data.root=", "data.shards=", "-c", "--cfg")
    if "data=shapes" in arguments:
        return arguments
    # Its learning rate is AdamW's, for a LoRA.
    if names("optimizer=", "adapter=full"):
        chosen = [] if own_data else ["data=shapes"]
    else:
        chosen = ["experiment=embedded" if own_data else "experiment=shapes"]
    # Overrides must stand together: options may come before or after them.
    first = next((place for place, one in enumerate(arguments) if "=" in one and not one.startswith("-")), 0)
    return [*arguments[:first], *chosen, *arguments[first:]]


def main() -> None:
    """The command line."""
    with command_line():
        sys.argv[1:] = with_examples(quote_values(sys.argv[1:]))
        run()


if __name__ == "__main__":
    main()
