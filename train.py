"""Fine-tune a LoRA: `python train.py --help` tells how."""

import contextlib
import gc
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from callbacks import find_callback
from callbacks.console import (
    configure_logging,
    end_workers,
    is_first_process,
    log,
    one_line_errors,
    quote_values,
    silence_libraries,
)
from datamodules.errors import UserError

if TYPE_CHECKING:
    import lightning.pytorch as L

    from datamodules.cached import CachedDataModule

CONF = Path(__file__).parent / "conf"
PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed"}


def run_folder(ckpt_path: str | None) -> str:
    """Where a run without output_dir= goes: a new folder, or with ckpt_path=last the newest that can go on."""
    if ckpt_path == "last":
        checkpoints = Path("outputs").glob("**/checkpoints/last.ckpt")
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            return str(newest.parent.parent)
    return time.strftime("outputs/%Y-%m-%d_%H-%M-%S")


OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
OmegaConf.register_new_resolver("precision_for", lambda dtype: PRECISION.get(dtype, "32-true"), replace=True)


def unless_4_bit(usual: float, four_bit: float, *, _root_: DictConfig) -> float:
    """A setting that is another where the base is quantized to 4 bits."""
    chosen = OmegaConf.select(_root_, "model.quantization") or {}
    four = chosen.get("format") in ("fp4", "nf4") and "transformer" in chosen.get("components_to_quantize", ())
    return four_bit if four else usual


OmegaConf.register_new_resolver("unless_4_bit", unless_4_bit, replace=True)


def shorten(folder: str) -> Path:
    """Hydra's absolute path, relative where it is below the working directory."""
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_checkpoint(ckpt_path: str | None, output_dir: Path) -> Path | None:
    """The checkpoint to go on from.

    Raises:
        UserError: it does not exist, or output_dir holds a run that this one would overwrite.
    """
    last = output_dir / "checkpoints" / "last.ckpt"
    path = None if ckpt_path is None else last if ckpt_path == "last" else Path(ckpt_path).expanduser()
    if path is not None and not (path.is_file() and zipfile.is_zipfile(path)):
        raise UserError(f"ckpt_path={ckpt_path}: there is no checkpoint {path}")
    # Other processes of a run may come here after the first has written its config.yaml.
    if is_first_process() and (output_dir / "config.yaml").exists() and (path is None or not path.samefile(last)):
        raise UserError(f"output_dir={output_dir} holds a run: go on by ckpt_path=last, or choose another folder")
    return path


def place_trainer(cfg: DictConfig) -> None:
    """model.devices.transformer decides where the trainer computes."""
    from lightning_modules.loading import resolve_device

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


def check_goes_on(settings: dict[str, Any], checkpoint: Path) -> None:
    """Compare with the run that wrote the checkpoint.

    Raises:
        UserError: adapter, optimizer or schedule differ. These go on from their saved state, which would hide a
            new setting.
    """
    config = checkpoint.parent.parent / "config.yaml"
    if not config.is_file():
        return
    saved: Any = OmegaConf.load(config)
    earlier: Any = OmegaConf.to_container(saved)
    for group in ("adapter", "optimizer", "scheduler", "model", "data"):
        before, now = earlier[group], settings[group]
        for key in sorted(before.keys() | now.keys()):
            # What follows from other settings, as the length of a schedule, may change with them.
            values = [OmegaConf.select(one, f"{group}.{key}") for one in (saved, OmegaConf.create(settings))]
            if before.get(key) != now.get(key) and values[0] != values[1]:
                what = f"{group}.{key} was {values[0]} in {config.parent} and is {values[1]} now"
                if group in ("adapter", "optimizer", "scheduler"):
                    raise UserError(
                        f"{what}: a run goes on with its own settings. To start a new one from its weights, pass "
                        f"adapter.init_from={config.parent} instead of ckpt_path"
                    )
                log.warning(f"note: {what}")


def build_cache(cfg: DictConfig, data: "CachedDataModule") -> Path:
    """Encode what the cache lacks of data.root; gives its folder."""
    from hydra.utils import instantiate
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from callbacks.contact_sheet import write_contact_sheet
    from callbacks.progress import EncodingProgress
    from callbacks.shard_writer import ShardWriter
    from datamodules.encoding import EncodingDataModule, lacking

    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, sampling=None, _convert_="all")
    data.serve(module)
    cache = data.cache(module)
    writer = ShardWriter(cache, data.shard_size)
    # The encoders are whole in every process, also where the transformer will be split.
    strategy = cfg.trainer.strategy if isinstance(cfg.trainer.strategy, str) else "ddp"
    callbacks = [writer, EncodingProgress(line_every=10)]
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
        except SystemExit as stop:  # how Lightning leaves after Ctrl-C and SIGTERM
            number = signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT
            log.info(f"stopped by {number.name}; the same command goes on from what is encoded in {cache.folder}")
            raise SystemExit(128 + number) from stop
        if trainer.is_global_zero and writer.encoded:
            data.open(cache)
            write_contact_sheet(data, cache.folder / "preview.png")
            log.info(f"encoded {writer.encoded} samples; look at them: {cache.folder / 'preview.png'}")
    return cache.folder


def fit(cfg: DictConfig, output_dir: Path) -> "L.Trainer":
    """Build everything from the composed config and train."""
    import lightning.pytorch as L
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from datamodules.cached import CachedDataModule

    if not isinstance(cfg.trainer.max_steps, int) or cfg.trainer.max_steps < 1:
        raise UserError(f"trainer.max_steps={cfg.trainer.max_steps}: must be a whole number from 1 on")
    checkpoint = find_checkpoint(cfg.ckpt_path, output_dir)
    settings = run_settings(cfg)  # before Hydra's instantiate, which resolves interpolations in place
    if checkpoint is not None:
        check_goes_on(settings, checkpoint)

    def save_config(trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            OmegaConf.save(OmegaConf.create(settings), output_dir / "config.yaml")

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
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers, default_root_dir=output_dir)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    except SIGTERMException:  # before the first batch, where there is nothing to save
        sys.exit(128 + signal.SIGTERM)
    return trainer


def report(trainer: "L.Trainer", output_dir: Path, monitor: str | None, model_name: str) -> float:
    """Say how good it is and where things are; gives what a sweep compares."""
    from callbacks.lora_checkpoint import LoRACheckpoint
    from callbacks.metrics import Metrics
    from callbacks.validation import Validation

    keeper = find_callback(trainer, LoRACheckpoint)
    stopped = None if keeper is None else keeper.signal
    if stopped is not None:
        if (output_dir / "checkpoints" / "last.ckpt").is_file():
            log.info(f"stopped by {stopped.name} after step {trainer.global_step}, saved in {output_dir}")
            log.info(f"go on with the same command and output_dir={output_dir} ckpt_path=last")
        else:
            log.info(f"stopped by {stopped.name} before the first step: nothing to save")
        # With several processes Lightning kills the first when another leaves with an error.
        sys.exit(128 + stopped if trainer.is_global_zero else 0)
    metrics = find_callback(trainer, Metrics)
    if metrics is not None and not metrics.latest:
        log.info(f"nothing to do: {output_dir} is at step {trainer.global_step}, trainer.max_steps={trainer.max_steps}")
    validation = find_callback(trainer, Validation)
    if validation is not None and validation.rows:
        log.info(validation.summary())
        log.info(f"look at it: {output_dir / 'report.html'}")
    module: Any = trainer.lightning_module
    last = output_dir / module.adapter.folder / "last"
    log.info(f"done: {last}")
    image = "" if module.condition_images.most == 0 else "image=PHOTO "
    weights = module.adapter.predict_arguments(str(output_dir), model_name)
    log.info(f'try it: python predict.py {weights} {image}prompt="..."')
    measured = {**(metrics.latest if metrics else {}), **(validation.latest if validation else {})}
    if not trainer.is_global_zero:  # what is measured is measured by the first process
        return float("nan")
    if monitor is None:
        monitor = "val_loss" if "val_loss" in measured else "loss_avg"
    if not measured:
        return float("nan")
    if monitor not in measured:
        raise UserError(f"monitor={monitor} was not measured: choose {', '.join(measured)}")
    return measured[monitor]


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(cfg: DictConfig) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    configure_logging()
    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    cfg.output_dir = str(output_dir)
    cfg.model_name = str(cfg.model_name)  # the name itself, for the run's config.yaml
    fresh = is_first_process() and not any(output_dir.iterdir())
    try:
        with one_line_errors(in_sweep=HydraConfig.get().mode is RunMode.MULTIRUN):
            if cfg.task == "dry_run":
                from callbacks.dry_run import dry_run

                if HydraConfig.get().mode is RunMode.MULTIRUN:
                    raise UserError("task=dry_run plans one run: leave -m and the lists out")
                silence_libraries()
                dry_run(cfg)
                return None
            if cfg.task != "fit":
                raise UserError(f"task={cfg.task}: choose fit or dry_run")
            return report(fit(cfg, output_dir), output_dir, cfg.monitor, cfg.model_name)
    finally:
        if fresh and not (output_dir / "config.yaml").exists():  # the run did not start: leave no traces
            shutil.rmtree(output_dir, ignore_errors=True)
        end_workers()
        # A sweep's next job loads its own model: let this one's go first.
        gc.collect()


def with_examples(arguments: list[str]) -> list[str]:
    """The command line; where it names neither data nor model, the embedded model learns from drawn examples."""
    names = ("data=", "data.root=", "data.shards=", "experiment=", "model=", "model.pretrained_model_name_or_path=")
    own_config = ("-cp", "-cn", "-cd", "--config")
    if any(one.startswith((*names, *own_config)) and one != "model=embedded" for one in arguments):
        return arguments
    # Its learning rate is AdamW's.
    other_optimizer = any(one.startswith("optimizer=") for one in arguments)
    return [*arguments, "data=shapes" if other_optimizer else "experiment=shapes"]


def main() -> None:
    """The command line."""
    sys.argv[1:] = with_examples(quote_values(sys.argv[1:]))
    run()


if __name__ == "__main__":
    main()
