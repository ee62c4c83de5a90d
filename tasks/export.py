"""task=export: write a LoRA for other programs, of another rank, several as one, or fused into a transformer."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from PIL import Image, ImageOps
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from callbacks.lora_checkpoint import model_header
from cli.check_values import check_ranges
from cli.folders import require_empty
from cli.placement import compute_device, frozen_model
from cli.terminal import log, silence_libraries
from foundation.errors import UserError, listing, printable
from foundation.files import short_name
from lightning_modules.adapters.full import FullFineTuning
from lightning_modules.adapters.fusing import extract, fuse_to_file, write_fused
from lightning_modules.adapters.gates import RankGate, read_rank_gate
from lightning_modules.adapters.targets import PATTERNS, Ranks
from lightning_modules.lora_files.compatibility import readers
from lightning_modules.lora_files.delta import Delta, LowRank, relative_change, weighted_sum
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.reading import (
    PEFT_CONFIG_NAME,
    PEFT_WEIGHTS_NAME,
    WEIGHTS_NAME,
    LoRAFile,
    find_or_download,
)
from lightning_modules.lora_files.writing import KOHYAS_BASE, LORA_FORMATS, modelspec, modelspec_in, write
from lightning_modules.pretrained.repository import resolve_dtype
from report.images import data_url, last_strips, save_png
from report.origin import published
from runs.run_folder import RunFolder, best_effort
from tasks.edit import as_list, weights_of
from tasks.models import KnownModel, is_given, model_for, without_network

# Smaller errors are rounding in float32.
FLOAT32_ERROR = 1e-5
# Entries of the Model Metadata Standard by the author of a LoRA.
KEPT_ENTRIES = ("author", "description", "date", "license", "usage_hint", "trigger_phrase", "tags", "thumbnail")


class ExportedLoRA(NamedTuple):
    """Deltas to write, and facts about their origin.

    Attributes:
        deltas: the delta of each layer.
        header: the file's header.
        scale: alpha / rank in training; None if unknown, or different between layers.
        gate: the gate of a T-LoRA whose rank follows the timestep.
    """

    deltas: dict[str, Delta]
    header: dict[str, Any]
    scale: float | None
    gate: RankGate | None = None

    @classmethod
    def read(cls, file: LoRAFile, model: KnownModel) -> "ExportedLoRA":
        """Read a file; raises UserError if it is not a LoRA of the model."""
        deltas, gate, ranks = file.read(model.names, model.base), read_rank_gate(file.path), Ranks.of_file(file)
        if gate is not None and gate.schedule.kind == "constant":
            gate = None
        if gate is not None and (other := [name for name, delta in deltas.items() if delta.divisor != gate.rows]):
            raise UserError(f"{file.path} is damaged: {other[0]} does not have the rank {gate.rows} of its schedule")
        return cls(deltas, file.header, None if ranks is None else ranks.scale, gate)

    @property
    def kind(self) -> str:
        return common_kind(self.deltas.values())

    @property
    def rank(self) -> int:
        return max(delta.divisor or 0 for delta in self.deltas.values())

    def header_of(self, export: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of a file of these deltas, without a rank schedule, and with facts about the export."""
        header = dict(self.header)
        if "adapter" in header:
            adapter = {key: value for key, value in header["adapter"].items() if key != "rank_schedule"}
            if self.kind in ("LoRA", "DoRA"):
                trained = Ranks.of_header(adapter)
                if trained is None or any(trained.rank_of(name) != one.divisor for name, one in self.deltas.items()):
                    adapter = {key: value for key, value in adapter.items() if key not in ("use_rslora", *PATTERNS)}
                    adapter |= {"rank": self.rank, "alpha": self.rank * (self.scale or 1.0)}
            header["adapter"] = adapter
        return header | {"export": {**header.get("export", {}), **export}}


def export(cfg: DictConfig, output_dir: Path) -> None:
    """Write the LoRA of cfg.lora, cfg.merge or cfg.extract, or a transformer with it in its weights."""
    dtype = resolve_dtype(cfg.export.dtype, "export.dtype", "float16")
    if cfg.format not in LORA_FORMATS:
        raise UserError(f"format={cfg.format}: choose {', '.join(LORA_FORMATS)}")
    files, weights = _chosen_files(cfg)
    titles = [title(file.path) for file in files] or [Path(str(cfg.extract)).name]
    path = _free_path(cfg, titles, output_dir)
    if cfg.fuse:
        no_effect = ["model/quantization" if cfg.format == "comfyui" else "format"]
        for key in [f"export.{name}" for name in cfg.export] + no_effect:
            if is_given(key):
                how = "transformer as its base is, or one file in model.dtype by format=comfyui"
                raise UserError(f"{key} has no effect with fuse=true, which writes a {how}. Omit it.")
    if cfg.extract is not None:
        lora, model = _extract(cfg)
    else:
        # The first file that names its model does so for all.
        model = model_for(cfg, sorted(files, key=lambda file: not file.header.get("model")))
        cfg.model = model.settings
        check_ranges(cfg, "predict")  # again: a file's header may contain any value
        loras = [ExportedLoRA.read(file, model) for file in files]
        lora = loras[0] if cfg.merge is None else _sum_of(loras, weights, [str(file.path) for file in files])
        if lora.gate is not None:
            lora = _first_components(lora, lora.gate, cfg.rank)
        elif cfg.rank is not None:
            lora = _with_rank(lora, cfg.rank)
    if cfg.fuse:
        _fuse(cfg, lora, model, path)
    else:
        facts = {"format": cfg.format, "from": titles}
        facts |= {"weights": weights} if cfg.merge is not None else {}
        facts |= {"rank": cfg.rank} if cfg.rank is not None else {}
        header = published(lora.header_of(facts), model.name)
        image = _sample_of(files[0]) if len(files) == 1 else None
        header["modelspec"] = _modelspec(cfg, files, titles, model, image)
        write(path, lora.deltas, header, dtype, cfg.format, model.names)
        if image is not None and (cfg.overwrite or not path.with_suffix(".png").exists()):  # LoRA managers show it
            save_png(image, path.with_suffix(".png"))
        _print_table(path, lora, model, cfg.format)
    log.info(f"done: {path}")


def _chosen_files(cfg: DictConfig) -> tuple[list[LoRAFile], list[float]]:
    """Return the files of lora= or merge= with their weights; empty for extract=."""
    given = [key for key in ("lora", "merge", "extract") if cfg[key] is not None]
    if len(given) != 1:
        raise UserError(
            "task=export writes one LoRA by lora=RUN, several as one by merge=[RUN,RUN], or a fine-tuned "
            f"transformer's by extract=FOLDER. Give one of them{', not ' + ' and '.join(given) if given else ''}"
        )
    if cfg.extract is not None:
        return [], []
    found = [LoRAFile(find_or_download(lora)) for lora in as_list(cfg, given[0])]
    if cfg.merge is None and (len(found) > 1 or cfg.merge_weights is not None):
        raise UserError("lora= writes one LoRA as it is. Name several, or one to be multiplied, by merge=")
    return found, weights_of(cfg, "merge_weights", len(found)) or [1.0] * len(found)


def _free_path(cfg: DictConfig, titles: list[str], output_dir: Path) -> Path:
    """Return the path to write to; raises UserError if something else is there and overwrite is false."""
    if cfg.fuse and cfg.format != "comfyui":
        require_empty(output_dir)
        return output_dir
    name = "+".join(titles) + ("" if cfg.rank is None else f"_rank{cfg.rank}")
    path = output_dir / (LORA_FORMATS[cfg.format].file or f"{short_name(name, 200)}_{cfg.format}.safetensors")
    require_free(path, cfg.overwrite)
    if path.name == PEFT_WEIGHTS_NAME:
        require_free(path.with_name(PEFT_CONFIG_NAME), cfg.overwrite)
    return path


def require_free(path: Path, overwrite: bool) -> None:
    """Raise a UserError if a file exists that may not be overwritten."""
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: choose another output_dir=FOLDER, or replace it by overwrite=true")


def _sum_of(loras: Sequence[ExportedLoRA], weights: Sequence[float], titles: Sequence[str]) -> ExportedLoRA:
    """Add LoRAs up, each times its weight; the header keeps the facts that hold for all of them.

    Args:
        titles: their names in messages.

    Raises:
        UserError: one of them is not a constant low-rank update.
    """
    for lora, title in zip(loras, titles, strict=True):
        kind = lora.kind if lora.gate is None else "T-LoRA"
        if kind != "LoRA":
            remedy = "" if kind == "DoRA" else ": write one by task=export rank=N first, and merge that file"
            raise UserError(f"merge=: {title} is a {kind}, and only plain LoRAs can be added up{remedy}")
    headers = [lora.header for lora in loras]
    bases = dict.fromkeys(str(header["base"]) for header in headers if "base" in header)
    if len(bases) > 1:
        log.warning(f"note: they were trained on different models: {', '.join(bases)}")
    header = next((header for header in headers if "model" in header), {})
    adapters = [header.get("adapter", {}) for header in headers]
    shared = {key: value for key, value in adapters[0].items() if all(one.get(key) == value for one in adapters)}
    kept = {key: value for key, value in header.items() if key not in ("step", "export")} | {"adapter": shared}
    scales = {lora.scale for lora in loras}
    terms = [{name: one for name, one in lora.deltas.items() if isinstance(one, LowRank)} for lora in loras]
    return ExportedLoRA(dict(weighted_sum(terms, weights)), kept, scales.pop() if len(scales) == 1 else None)


def _with_rank(lora: ExportedLoRA, rank: int) -> ExportedLoRA:
    """Return the closest LoRA of a rank, and log the distance."""
    if lora.kind == "DoRA":
        raise UserError(f"rank={rank}: this is a DoRA, which scales whole rows of weights: it keeps its rank")
    if lora.kind == "LoRA" and lora.rank <= rank:
        log.info(f"rank={rank}: no layer has a higher one, all stay as they are")
        return lora
    reduced: dict[str, Delta] = {name: delta.reduced(rank) for name, delta in lora.deltas.items()}
    log.info(f"rank={rank}: the update changes by {relative_change(lora.deltas, reduced):.2%}")
    if lora.kind == "LoRA":
        return lora._replace(deltas=reduced)
    adapter = {"target_modules": lora.header.get("adapter", {}).get("target_modules")}
    return ExportedLoRA(reduced, {**lora.header, "adapter": adapter}, None)


def _first_components(lora: ExportedLoRA, gate: RankGate, rank: int | None) -> ExportedLoRA:
    low, high = max(gate.schedule.min_rank, 1), gate.schedule.rank
    if rank is None or rank > high:
        raise UserError(
            "this is a T-LoRA, whose rank follows the timestep, and a file for other programs has one. Pass rank=N, "
            f"from {low}, its rank at noise, to {high}, the rank in programs that do not follow the schedule"
        )
    log.warning(f"note: the rank is {rank} at every timestep; the T-LoRA's is {low} to {high}")
    return lora._replace(
        deltas={name: one.first(rank * gate.width) for name, one in lora.deltas.items() if isinstance(one, LowRank)}
    )


def title(path: Path) -> str:
    """Return a short name of a LoRA file: its own name, or its run's.

    outputs/snow/lora/last -> snow; outputs/snow/lora/step-000200 -> snow_step-000200.
    """
    path = Path(printable(str(path.absolute())))
    if path.name not in (WEIGHTS_NAME, PEFT_WEIGHTS_NAME):
        return re.sub(rf"_({'|'.join(LORA_FORMATS)})$", "", path.stem)
    folder, run = path.parent, path.parent.parent.parent
    if folder.parent.name != "lora":
        return folder.name
    name = f"{run.parent.name}_{run.name}" if run.name.isdigit() else run.name  # of a sweep's job
    return name if folder.name == "last" else f"{name}_{folder.name}"


def _sample_of(file: LoRAFile) -> Image.Image | None:
    """Return the first published sample image of a file's run at its step; None without one."""
    with best_effort("preview"):
        strips = last_strips(RunFolder(file.path.parent.parent.parent), file.header.get("step", math.inf))
        return next((strip.result for strip in strips if not strip.private), None)
    return None


def _modelspec(
    cfg: DictConfig, files: Sequence[LoRAFile], titles: Sequence[str], model: KnownModel, image: Image.Image | None
) -> dict[str, str]:
    """Return the entries of the Model Metadata Standard, and the base for kohya's readers.

    Entries of a single file's author are kept; `image` becomes the thumbnail.
    """
    facts: dict[str, str | None] = {"title": "+".join(titles), "implementation": cfg.format}
    facts[KOHYAS_BASE] = re.sub("_fp[48]$", "", model.name)
    facts["thumbnail"] = None if image is None else data_url(ImageOps.fit(image, (256, 256)), 256)
    for file in files if cfg.merge is None else ():
        # Not today's date: each export of a file has the same bytes.
        facts["date"] = datetime.fromtimestamp(file.path.stat().st_mtime, UTC).date().isoformat()
        facts |= {key: text for key, text in modelspec_in(file.metadata).items() if key in KEPT_ENTRIES}
    facts |= {key: cfg.export[key] for key in ("title", "author", "license") if cfg.export[key]}
    return modelspec(model.name, published(model.base, model.name), model.settings.resolution, **facts)


def _print_table(path: Path, lora: ExportedLoRA, model: KnownModel, format: str) -> None:
    """Print the facts of the written file, as read back, and its readers."""
    written = LoRAFile(path)
    read = written.read(model.names, model.base)
    stored = next(written.dtypes[key] for key, shape in written.shapes.items() if shape)  # an alpha is a scalar
    error = relative_change(lora.deltas, read)
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("format", format)
    table.add_row("model", f"{model.base}{', or another one of these layers' if model.guessed else ''}")
    table.add_row("layers", f"{len(written.parts)}, {lora.kind}")
    table.add_row("rank", ", ".join(dict.fromkeys(delta.size for delta in written.empty.values())))
    table.add_row("dtype", stored + ("" if error < FLOAT32_ERROR else f", {error:.2%} off"))
    table.add_row("size", decimal(path.stat().st_size))
    table.add_section()
    module = without_network(model.settings)
    for reader in readers(path, format, model.names, module.pipeline_name, module.base.source.meta):
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
    deltas, error, others = extract(module.base.source, tuned, cfg.rank, device)
    log.info(f"rank {cfg.rank} lacks {error:.2%} of the difference")
    if others:
        log.warning(f"note: a LoRA cannot hold what else differs, biases and norms: {listing(others)}")
    header = {"model": model_header(name, settings), **module.base.provenance()}
    header["adapter"] = {"rank": cfg.rank, "alpha": cfg.rank}
    model = KnownModel(name, module.base.name, module.base.layer_names, cfg.model)
    return ExportedLoRA(dict(deltas), header, 1.0), model


def _fuse(cfg: DictConfig, lora: ExportedLoRA, model: KnownModel, path: Path) -> None:
    """Write the model's transformer with the LoRA in its weights to a folder, or to one file of format=comfyui."""
    if model.guessed:
        raise UserError(f"fuse=true needs the model itself: pass model=NAME, as in model={model.name}")
    silence_libraries()
    device = compute_device(cfg)
    module = frozen_model(cfg)
    module.check()
    source, is_file = module.base.source, cfg.format == "comfyui"
    rounding = (fuse_to_file if is_file else write_fused)(source, lora.deltas, path, device)
    size = sum(one.stat().st_size for one in ([path] if is_file else path.glob("*.safetensors")))
    precision = str(source.dtype).removeprefix("torch.") if is_file else source.precision
    log.info(f"{path} contains {module.base.title}'s transformer with the LoRA, {precision}, {decimal(size)}")
    if rounding is not None and rounding.share > 0:
        log.info(f"rounding to {precision} changes the update by {rounding.share:.2%}")
    comfyui = "; in ComfyUI: move it to models/diffusion_models" if is_file else ""
    log.info(f"use it: model={model.name} model.transformer_name_or_path={path}{comfyui}")
