"""Fine-tune a LoRA: `python train.py --help` tells how."""

import gc
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    import lightning.pytorch as L

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
OmegaConf.register_new_resolver("assets", lambda name: str(Path(__file__).parent / "assets" / name), replace=True)
OmegaConf.register_new_resolver("precision_for", lambda dtype: PRECISION.get(dtype, "32-true"), replace=True)


def shorten(folder: str) -> Path:
    """Hydra's absolute path, relative where it is below the working directory."""
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_checkpoint(ckpt_path: str | None, output_dir: Path) -> str | None:
    """The checkpoint to go on from.

    Raises:
        UserError: it does not exist, or output_dir holds a run that this one would overwrite.
    """
    from datamodules.errors import UserError

    last = output_dir / "checkpoints" / "last.ckpt"
    if ckpt_path is None:
        if last.is_file():
            raise UserError(
                f"output_dir={output_dir} holds a run: go on with it by ckpt_path=last, or choose another folder"
            )
        return None
    path = last if ckpt_path == "last" else Path(ckpt_path).expanduser()
    if not path.is_file():
        raise UserError(f"ckpt_path={ckpt_path}: there is no checkpoint {path}")
    return str(path)


def place_trainer(cfg: DictConfig) -> None:
    """model.devices.transformer decides where the trainer computes."""
    device = cfg.model.devices.transformer
    if device is None:
        return
    kind, _, index = device.partition(":")
    cfg.trainer.accelerator = {"cuda": "gpu"}.get(kind, kind)
    cfg.trainer.devices = [int(index or 0)] if kind == "cuda" else 1


def save_config(cfg: DictConfig, output_dir: Path, trainer: "L.Trainer") -> None:
    """config.yaml, from which a run can be repeated: `python train.py -cp RUN -cn config output_dir=...`."""
    if not trainer.is_global_zero:
        return
    primary: Any = OmegaConf.load(CONF / "train.yaml")
    hydra_defaults = [entry for entry in primary.defaults if str(entry).startswith("{'override")]
    settings: Any = OmegaConf.to_container(cfg)
    whole = OmegaConf.create({"defaults": ["_self_", *hydra_defaults], **settings, "hydra": primary.hydra})
    OmegaConf.save(whole, output_dir / "config.yaml")


def fit(cfg: DictConfig, output_dir: Path) -> "L.Trainer":
    """Build everything from the composed config and train."""
    import lightning.pytorch as L
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import LambdaCallback

    from callbacks.console import silence_libraries

    checkpoint = find_checkpoint(cfg.ckpt_path, output_dir)
    place_trainer(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    module = instantiate(cfg.model)
    silence_libraries()
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    loggers = [instantiate(logger) for logger in (cfg.logger or {}).values() if logger is not None]
    callbacks.append(LambdaCallback(on_train_start=lambda trainer, _: save_config(cfg, output_dir, trainer)))
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers, default_root_dir=output_dir)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return trainer


def report(trainer: "L.Trainer", output_dir: Path) -> float:
    """Say where things are; the running mean of the loss is what a sweep compares."""
    from callbacks.console import log
    from callbacks.lora_checkpoint import LoRACheckpoint
    from callbacks.metrics import Metrics

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    stopped = next((c.signal for c in callbacks if isinstance(c, LoRACheckpoint)), None)
    if stopped is not None:
        log.info(f"stopped by {stopped.name} after step {trainer.global_step}, saved in {output_dir}")
        log.info(f"go on with the same command and output_dir={output_dir} ckpt_path=last")
        sys.exit(128 + stopped)
    log.info(f"done: {output_dir / 'lora' / 'last'}")
    log.info(f'try it: python predict.py lora={output_dir} image=PHOTO prompt="..."')
    return next(c.latest.get("loss_avg", float("nan")) for c in callbacks if isinstance(c, Metrics))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> float:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from callbacks.console import configure_logging, one_line_errors

    configure_logging()
    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    cfg.output_dir = str(output_dir)
    cfg.model_name = str(cfg.model_name)  # the name itself, for the run's config.yaml
    fresh = not any(output_dir.iterdir())
    try:
        with one_line_errors(in_sweep=HydraConfig.get().mode is RunMode.MULTIRUN):
            return report(fit(cfg, output_dir), output_dir)
    finally:
        if fresh and not (output_dir / "config.yaml").exists():  # the run did not start: leave no traces
            shutil.rmtree(output_dir)
        # A sweep's next job loads its own model: let this one's go first.
        gc.collect()


if __name__ == "__main__":
    main()
