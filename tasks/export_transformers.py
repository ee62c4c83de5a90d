"""Whole transformers in task=export: a LoRA of what one has learned, and one that has a LoRA in its weights."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.filesize import decimal

from callbacks.lora_checkpoint import model_header
from datamodules.errors import UserError, listing
from lightning_modules.adapters.extraction import extract
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.full import FullFineTuning
from lightning_modules.adapters.fusing import write_fused
from lightning_modules.adapters.update import Update
from report.quoting import override
from runs.run_folder import RunFolder
from tasks.export_table import most_in, percent
from tasks.folders import require_empty
from tasks.loras_read import LoRA
from tasks.models import KnownModel, without_network
from tasks.placement import compute_device, frozen_model
from tasks.terminal import log, silence_libraries

# A share of the update that is lost by rounding, above which people would see it.
MUCH = 0.2


def extracted(cfg: DictConfig) -> tuple[LoRA, KnownModel]:
    """The LoRA of cfg.rank that is nearest to what cfg.extract has learned, beside the model of model=."""
    if cfg.rank is None:
        raise UserError(f"extract={cfg.extract} needs rank=N: how much of the difference the LoRA can hold")
    silence_libraries()
    name = HydraConfig.get().runtime.choices["model"]
    settings: Any = OmegaConf.to_container(cfg.model, resolve=True)
    device, module = compute_device(cfg), frozen_model(cfg)
    module.base.check()
    run = RunFolder(str(cfg.extract)).weights(FullFineTuning.folder, "last")
    tuned = str(run if run.is_dir() else cfg.extract)
    log.info(f"comparing {tuned} with {module.base.transformer_name}, layer by layer")
    found = extract(module.base.source, tuned, cfg.rank, device)
    log.info(f"rank {cfg.rank} lacks {percent(found.error)} of the difference, {most_in(found.errors)}")
    if found.others:
        log.warning(f"note: a LoRA cannot hold what else differs, biases and norms: {listing(found.others)}")
    header = {"model": model_header(name, settings), **module.base.provenance()}
    header["adapter"] = {"rank": cfg.rank, "alpha": cfg.rank}
    updates: dict[str, Update] = dict(found.updates)
    return LoRA(updates, header, 1.0), KnownModel(name, module.base.name, LayerNames.of(module.base), cfg.model)


def check_fuse(cfg: DictConfig, output_dir: Path) -> None:
    """Raise a UserError for what fuse=true does not do."""
    overrides = HydraConfig.get().overrides.task
    for key in ("format", "export.dtype"):
        if any(override.startswith(f"{key}=") for override in overrides):
            raise UserError(f"{key} has no effect with fuse=true, which writes a transformer as its base is")
    require_empty(output_dir)


def fuse(cfg: DictConfig, lora: LoRA, model: KnownModel, output_dir: Path) -> None:
    """Write the model's transformer with the LoRA in its weights to output_dir."""
    if model.guessed:
        raise UserError(f"fuse=true needs the model itself: pass model=NAME, as in model={model.name}")
    silence_libraries()
    device = compute_device(cfg)
    module = frozen_model(cfg)
    module.check()
    source = module.base.source
    if source.stored_format is None and source.quantization is not None:
        source.quantization.require_layout("fuse=true")
    rounding = write_fused(source, lora.updates, output_dir, device)
    size = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    log.info(f"{output_dir} holds {model.base}'s transformer with the LoRA in it, {source.precision}, {decimal(size)}")
    if rounding is not None and rounding.share > 0:
        change = f"rounding to {source.precision} changes the update by {percent(rounding.share)}"
        if rounding.share > MUCH:
            log.warning(f"note: {change}: use the LoRA beside the base where you can")
        else:
            log.info(change)
    with without_network(model.settings) as module:
        image = "" if module.condition_images.most == 0 else " image=PHOTO.png"
    log.info(f'use it: python predict.py {_same_model(model, output_dir)}{image} prompt="..."')


def _same_model(model: KnownModel, transformer: Path) -> str:
    """The settings of a model, as arguments of a command line, with another transformer."""
    default = hydra.compose("predict", overrides=[f"model={model.name}"]).model
    plain = {str(key): value for key, value in model.settings.items() if isinstance(value, str | int | float)}
    others = {f"model.{key}": value for key, value in plain.items() if key != "seed" and value != default.get(key)}
    settings = {"model": model.name, **others, "model.transformer_name_or_path": str(transformer)}
    return " ".join(override(key, value) for key, value in settings.items())
