"""task=export: write a LoRA for other programs, of another rank, several as one, or into a transformer's weights."""

from pathlib import Path

from omegaconf import DictConfig

from datamodules.errors import UserError
from datamodules.files import short_name
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME, find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.written import FORMATS, export_dtype, save_lora
from report.origin import published
from tasks.edit import as_list
from tasks.export_ranks import with_constant_rank, with_rank
from tasks.export_table import say_written
from tasks.export_transformers import check_fuse, extracted, fuse
from tasks.loras_read import LoRA, ReadLoRA, alone, sum_of, title
from tasks.models import KnownModel, model_for
from tasks.settings import check_ranges
from tasks.terminal import log


def export(cfg: DictConfig, output_dir: Path) -> None:
    """Write the LoRA of cfg.lora, cfg.merge or cfg.extract, or a transformer that has it in its weights."""
    dtype = export_dtype(cfg.export.dtype)
    if cfg.format not in FORMATS:
        raise UserError(f"format={cfg.format}: choose {', '.join(FORMATS)}")
    files, weights = chosen(cfg)
    titles = [title(file.path) for file in files] or [Path(str(cfg.extract)).name]
    path = free_path(cfg, titles, output_dir)
    if cfg.fuse:
        check_fuse(cfg, output_dir)
    note = ""
    if cfg.extract is not None:
        lora, model = extracted(cfg)
    else:
        # The first one that tells its model does so for all.
        model = model_for(cfg, sorted(files, key=lambda file: not (file.header or {}).get("model")))
        cfg.model = model.settings
        check_ranges(cfg, "predict")  # again: a file's header may hold any value
        lora, note = read(cfg, [ReadLoRA(file, model) for file in files], weights, model)
    if cfg.fuse:
        fuse(cfg, lora, model, output_dir)
    else:
        made = {"format": cfg.format, "from": titles}
        made |= {"weights": weights} if cfg.merge is not None else {}
        made |= {"rank": cfg.rank} if cfg.rank is not None else {}
        header = published(lora.header_of(made), model.name)
        save_lora(lora.updates, path, header, dtype, cfg.format, model.names)
        say_written(path, lora, model, cfg.format)
    if note:
        log.warning(note)
    log.info(f"done: {output_dir if cfg.fuse else path}")


def read(cfg: DictConfig, ones: list[ReadLoRA], weights: list[float], model: KnownModel) -> tuple[LoRA, str]:
    """One LoRA, or the sum of several, of cfg.rank; and what is to be said of it."""
    if cfg.merge is not None:
        return with_rank(sum_of(ones, weights), cfg.rank), ""
    if ones[0].gate is not None:
        return with_constant_rank(cfg, ones[0], model)
    return with_rank(alone(ones[0]), cfg.rank), ""


def free_path(cfg: DictConfig, titles: list[str], output_dir: Path) -> Path:
    """Where the file goes; raises UserError where something is that is not to be overwritten."""
    name = "+".join(titles) + ("" if cfg.rank is None else f"_rank{cfg.rank}")
    path = output_dir / (FORMATS[cfg.format].file or f"{short_name(name, 200)}_{cfg.format}.safetensors")
    written = [path, *([path.with_name(PEFT_CONFIG_NAME)] if path.name == PEFT_WEIGHTS_NAME else [])]
    for one in written:
        if one.exists() and not cfg.overwrite:
            raise UserError(f"{one} exists: choose another output_dir=FOLDER, or replace it by overwrite=true")
    return path


def chosen(cfg: DictConfig) -> tuple[list[LoRAFile], list[float]]:
    """The files of lora= or merge=, and each one's weight; none of extract=."""
    given = [key for key in ("lora", "merge", "extract") if cfg[key] is not None]
    if len(given) != 1:
        raise UserError(
            "task=export writes one LoRA by lora=RUN, several as one by merge=[RUN,RUN], or that of a fine-tuned "
            f"transformer by extract=FOLDER: give one of them{', not ' + ' and '.join(given) if given else ''}"
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
        raise UserError(f"merge={cfg.merge}: name two or more, or what to multiply the one by with merge_weights=")
    weights = [1.0] * len(found) if cfg.merge_weights is None else list(map(float, as_list(cfg, "merge_weights")))
    if len(weights) != len(found):
        raise UserError(f"merge_weights={cfg.merge_weights}: {len(weights)} for {len(found)} LoRAs: give one for each")
    return found, weights
