"""task=export: write a LoRA for other programs, of another rank, several as one, or fused into a transformer."""

from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from callbacks.lora_checkpoint import model_header
from datamodules.errors import UserError, listing
from datamodules.files import short_name
from lightning_modules.adapters.full import FullFineTuning
from lightning_modules.adapters.fusing import extract, write_fused
from lightning_modules.lora_files.arithmetic import relative_change
from lightning_modules.lora_files.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME, find_or_download
from lightning_modules.lora_files.programs import readers
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import FORMATS, export_dtype, write
from report.origin import published
from runs.run_folder import RunFolder
from tasks.edit import as_list
from tasks.exported_lora import ExportedLoRA, percent, sum_of, title, with_constant_rank, with_rank
from tasks.folders import require_empty
from tasks.models import KnownModel, model_for
from tasks.placement import compute_device, frozen_model
from tasks.settings import check_ranges
from tasks.terminal import log, silence_libraries

# By safetensors' names.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Smaller errors are rounding in float32.
FLOAT32_ERROR = 1e-5
# Share of the update lost by rounding, from which on people would see it.
VISIBLE_LOSS = 0.2


def export(cfg: DictConfig, output_dir: Path) -> None:
    """Write the LoRA of cfg.lora, cfg.merge or cfg.extract, or a transformer with it in its weights."""
    dtype = export_dtype(cfg.export.dtype)
    if cfg.format not in FORMATS:
        raise UserError(f"format={cfg.format}: choose {', '.join(FORMATS)}")
    files, weights = _chosen_files(cfg)
    titles = [title(file.path) for file in files] or [Path(str(cfg.extract)).name]
    path = _free_path(cfg, titles, output_dir)
    if cfg.fuse:
        _check_fuse(output_dir)
    if cfg.extract is not None:
        lora, model = _extract(cfg)
    else:
        # The first file that names its model does so for all.
        model = model_for(cfg, sorted(files, key=lambda file: not (file.header or {}).get("model")))
        cfg.model = model.settings
        check_ranges(cfg, "predict")  # again: a file's header may contain any value
        lora = _read(cfg, files, weights, model)
    if cfg.fuse:
        _fuse(cfg, lora, model, output_dir)
    else:
        facts = {"format": cfg.format, "from": titles}
        facts |= {"weights": weights} if cfg.merge is not None else {}
        facts |= {"rank": cfg.rank} if cfg.rank is not None else {}
        header = published(lora.header_of(facts), model.name)
        write(path, lora.deltas, header, dtype, cfg.format, model.names)
        _print_table(path, lora, model, cfg.format)
    log.info(f"done: {output_dir if cfg.fuse else path}")


def _chosen_files(cfg: DictConfig) -> tuple[list[LoRAFile], list[float]]:
    """Return the files of lora= or merge= with their weights; empty for extract=."""
    given = [key for key in ("lora", "merge", "extract") if cfg[key] is not None]
    if len(given) != 1:
        raise UserError(
            "task=export writes one LoRA by lora=RUN, several as one by merge=[RUN,RUN], or that of a fine-tuned "
            f"transformer by extract=FOLDER. Give one of them{', not ' + ' and '.join(given) if given else ''}"
        )
    if cfg.extract is not None:
        return [], []
    key = "lora" if cfg.merge is None else "merge"
    found = [LoRAFile(find_or_download(lora)) for lora in as_list(cfg, key)]
    if cfg.merge is None:
        if len(found) > 1:
            raise UserError(f"lora={cfg.lora}: to write several as one, name them by merge=")
        if cfg.merge_weights is not None:
            raise UserError("merge_weights has no effect without merge=")
        return found, [1.0]
    if len(found) == 1 and cfg.merge_weights is None:
        raise UserError(f"merge={cfg.merge}: name two or more, or multiply the one by merge_weights=")
    weights = [1.0] * len(found) if cfg.merge_weights is None else list(map(float, as_list(cfg, "merge_weights")))
    if len(weights) != len(found):
        raise UserError(f"merge_weights={cfg.merge_weights}: {len(weights)} for {len(found)} LoRAs. Give one for each")
    return found, weights


def _free_path(cfg: DictConfig, titles: list[str], output_dir: Path) -> Path:
    """Return the file's path; raises UserError if something else is there and overwrite is false."""
    name = "+".join(titles) + ("" if cfg.rank is None else f"_rank{cfg.rank}")
    path = output_dir / (FORMATS[cfg.format].file or f"{short_name(name, 200)}_{cfg.format}.safetensors")
    written = [path, *([path.with_name(PEFT_CONFIG_NAME)] if path.name == PEFT_WEIGHTS_NAME else [])]
    for one in written:
        if one.exists() and not cfg.overwrite:
            raise UserError(f"{one} exists: choose another output_dir=FOLDER, or replace it by overwrite=true")
    return path


def _read(cfg: DictConfig, files: list[LoRAFile], weights: list[float], model: KnownModel) -> ExportedLoRA:
    """Read one LoRA, or the sum of several, of cfg.rank."""
    loras = [ExportedLoRA.read(file, model) for file in files]
    lora = loras[0] if cfg.merge is None else sum_of(loras, weights, [str(file.path) for file in files])
    if lora.gate is not None:
        return with_constant_rank(cfg, lora, model)
    return lora if cfg.rank is None else with_rank(lora, cfg.rank)


def _print_table(path: Path, lora: ExportedLoRA, model: KnownModel, format: str) -> None:
    """Print the facts of the written file, as read back, and its readers."""
    written = LoRAFile(path)
    read = written.read(model.names, model.base)
    stored = next(written.dtypes[key] for key, shape in written.shapes.items() if shape)  # an alpha is a scalar
    error = relative_change(lora.deltas, read)
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("format", format)
    table.add_row("model", f"{model.base}{', or another one of these layers' if model.guessed else ''}")
    table.add_row("layers", f"{len(written.parts)}{', DoRA' if lora.is_dora else ''}")
    if lora.kind == "LoRA":
        most = max(delta.divisor or 0 for delta in written.empty.values())
        fused = f", {most} where several of diffusers' layers are one here" if most > lora.rank else ""
        table.add_row("rank", f"{lora.rank}{fused}")
    else:
        table.add_row(lora.kind, ", ".join(dict.fromkeys(delta.size for delta in written.empty.values())))
    table.add_row("dtype", str(DTYPES[stored])[6:] + ("" if error < FLOAT32_ERROR else f", {percent(error)} off"))
    table.add_row("size", decimal(path.stat().st_size))
    table.add_section()
    family: type[Any] = get_class(model.settings._target_)
    for reader in readers(format, model.names, lora.deltas, family.pipeline_name, lora.kind, lora.is_dora):
        table.add_row(reader.program, escape(reader.verdict))
    Console(stderr=True).print(table)


def _extract(cfg: DictConfig) -> tuple[ExportedLoRA, KnownModel]:
    """Return the LoRA of cfg.rank that is closest to the difference of cfg.extract from the model of model=."""
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
    log.info(f"rank {cfg.rank} lacks {percent(found.error)} of the difference")
    if found.others:
        log.warning(f"note: a LoRA cannot hold what else differs, biases and norms: {listing(found.others)}")
    header = {"model": model_header(name, settings), **module.base.provenance()}
    header["adapter"] = {"rank": cfg.rank, "alpha": cfg.rank}
    model = KnownModel(name, module.base.name, module.base.layer_names, cfg.model)
    return ExportedLoRA(dict(found.deltas), header, 1.0), model


def _check_fuse(output_dir: Path) -> None:
    """Raise a UserError for settings that fuse=true ignores, and for a folder with files."""
    overrides = HydraConfig.get().overrides.task
    for key in ("format", "export.dtype"):
        if any(override.startswith(f"{key}=") for override in overrides):
            raise UserError(f"{key} has no effect with fuse=true, which writes a transformer as its base is")
    require_empty(output_dir)


def _fuse(cfg: DictConfig, lora: ExportedLoRA, model: KnownModel, output_dir: Path) -> None:
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
    rounding = write_fused(source, lora.deltas, output_dir, device)
    size = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    log.info(f"{output_dir} contains {model.base}'s transformer with the LoRA, {source.precision}, {decimal(size)}")
    if rounding is not None and rounding.share > 0:
        change = f"rounding to {source.precision} changes the update by {percent(rounding.share)}"
        if rounding.share > VISIBLE_LOSS:
            log.warning(f"note: {change}: use the LoRA next to the base where you can")
        else:
            log.info(change)
    log.info(f"use it: model={model.name} model.transformer_name_or_path={output_dir}")
