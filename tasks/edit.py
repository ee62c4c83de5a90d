"""task=edit: edit or create images."""

import gc
import math
from contextvars import ContextVar
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from callbacks.image_writer import PREDICTIONS, ImageWriter
from callbacks.lifecycle import GracefulStop
from cli.check_values import check_ranges
from cli.placement import frozen_model, place_trainer, require_card
from cli.terminal import log, silence_libraries
from datamodules.edits import EditsDataModule
from foundation.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.family import Sampling
from lightning_modules.lora_files.reading import LoRAFile, find_or_download
from lightning_modules.lora_files.writing import SPEC_PREFIX
from lightning_modules.objectives.slider import SliderObjective
from report.origin import published
from runs.signals import stop
from tasks.models import header_here, is_given, model_settings

TRIGGER_PHRASE = f"{SPEC_PREFIX}trigger_phrase"
KEPT: ContextVar[dict[str, Any] | None] = ContextVar("kept", default=None)  # model and settings, if it stays loaded


def kept_or_new(cfg: DictConfig) -> Any:
    """Return the loaded model if it has these settings; otherwise release it and return a new one."""
    if (kept := KEPT.get()) is None:
        return frozen_model(cfg)
    model: Any = OmegaConf.to_container(cfg.model)
    if (settings := model | {"sampling": cfg.trainer}) != kept.get("settings"):
        kept.clear()
        gc.collect()  # layers and hooks refer to each other
        kept |= {"module": (module := frozen_model(cfg)), "settings": settings}
        # Other LoRAs need other blocks.
        module.stays_loaded = not (cfg.model.compile is True or cfg.model.offload.blocks)
        module.base.timer.listeners += [partial(print, flush=True), lambda _: stop.check()]
    return kept["module"]


def edit(cfg: DictConfig, output_dir: Path) -> None:
    """Edit cfg.image, or create images from the prompt only."""
    if (output_dir / PREDICTIONS).exists():
        raise UserError(f"output_dir={output_dir} already contains predictions: choose another folder")
    if cfg.lora is None:
        log.info(f"no lora=: only the model ({cfg.model.pretrained_model_name_or_path})")
    files = [find_or_download(lora) for lora in as_list(cfg, "lora")] if cfg.lora is not None else []
    loras = list(map(LoRAFile, files))
    headers = list(map(header_here, loras))
    cfg.model = model_settings(cfg, headers, HydraConfig.get().overrides.task)
    check_ranges(cfg, "predict")  # again: the file's header may contain any value
    by_layer = {}
    if isinstance(cfg.lora_scale, DictConfig):
        by_layer = {str(pattern): float(scale) for pattern, scale in cfg.lora_scale.items()}
    scales = [1.0] if by_layer or cfg.lora_scale is None else [float(scale) for scale in as_list(cfg, "lora_scale")]
    weights = lora_weights(cfg, len(files), scales)
    scales = list(dict.fromkeys(scales))
    are_sliders = bool(headers) and all(header.get("objective") == SliderObjective.name for header in headers)
    if cfg.lora_scale is None and are_sliders:
        scales = list(map(float, SliderObjective.scales))
        log.info("a slider: images from lora_scale=-2 to 2; lora_scale=1 makes only one")
    if not files and (by_layer or scales != [1.0]):
        raise UserError("lora_scale needs lora=: name the weights that it scales")
    require_card(cfg)
    place_trainer(cfg)
    own = cfg.model.sampling  # settings without a key of their own in predict.yaml are the model's
    sampling = Sampling(**{field.name: cfg.get(field.name, own[field.name]) for field in fields(Sampling)})
    family: Any = get_class(cfg.model._target_)
    data = requests(cfg, family.sampling_rules.negative_prompt(sampling), scales, loras)
    cfg.model.transformer_name_or_path = sampling.transformer_name_or_path or cfg.model.transformer_name_or_path
    module = kept_or_new(cfg)
    module.sampler.loras, module.sampler.sampling = AppliedLoRAs(files, by_layer, weights), sampling
    note_unused_area(cfg, module)
    warn_of_other_base(module, files, [lora.header for lora in loras])
    silence_libraries()
    callbacks = [ImageWriter(str(output_dir)), GracefulStop()]
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False)
    try:
        trainer.predict(module, datamodule=data, return_predictions=False)
    except BaseException as error:
        if (output_dir / PREDICTIONS).exists():
            error.add_note(f"finished images are in {output_dir}")
        raise
    log.info(f"done: {output_dir}")


def requests(
    cfg: DictConfig, negative_prompt: str | None, lora_scales: list[float], loras: list[LoRAFile]
) -> EditsDataModule:
    """Return all requested images: images by prompts, seeds and scales. Headers with implausible sizes name none."""
    headers, phrases = [lora.header for lora in loras], [lora.metadata.get(TRIGGER_PHRASE) for lora in loras]
    if isinstance(cfg.prompts_file, ListConfig):
        raise UserError(
            f"prompts_file={cfg.prompts_file}: only one file is read. Put all prompts into it, one a line, or pass "
            "prompt=[...]."
        )
    return EditsDataModule(
        image=as_list(cfg, "image") if isinstance(cfg.image, ListConfig) else cfg.image,
        prompt=None if cfg.prompt is None else [str(prompt) for prompt in as_list(cfg, "prompt")],
        negative_prompt=negative_prompt,
        seeds=list(dict.fromkeys(seed + i for seed in as_list(cfg, "seed") for i in range(cfg.num_images_per_prompt))),
        lora_scales=lora_scales,
        caption_per_line=all(header.get("caption_per_line", True) for header in headers),
        trigger_word=", ".join(dict.fromkeys(filter(None, phrases))) or None,
        trained=max((int(n) for one in headers if (n := one.get("resolution", 0)) in range(16, 4097)), default=0),
        **{name: cfg[name] for name in ("prompts_file", "height", "width", "max_area", "batch_size")},
    )


def lora_weights(cfg: DictConfig, count: int, scales: list[float]) -> list[float] | None:
    """Return the strength of each LoRA, None for 1; raise a UserError if `scales` may be meant as strengths."""
    if cfg.lora_weights is None and count == len(scales) > 1:
        raise UserError(
            f"lora_scale={cfg.lora_scale} for {count} LoRAs is ambiguous. For a strength of each LoRA write "
            f"lora_weights={cfg.lora_scale}; for an image of all at each scale add lora_weights={[1] * count}."
        )
    return weights_of(cfg, "lora_weights", count)


def weights_of(cfg: DictConfig, key: str, count: int) -> list[float] | None:
    """Return the weights of so many LoRAs, None if the setting is null; raise a UserError if their numbers differ."""
    if cfg[key] is None:
        return None
    weights = [float(weight) for weight in as_list(cfg, key)]
    if len(weights) != count:
        raise UserError(f"{key}={cfg[key]}: {len(weights)} for {count} LoRAs. Give one for each.")
    return weights


def as_list(cfg: DictConfig, key: str) -> list[Any]:
    """Return the values of a setting that may be one value or a list."""
    value = cfg[key]
    values = list(value) if isinstance(value, ListConfig) else [value]
    if not values:
        raise UserError(f"{key}=[]: the list is empty")
    return values


def note_unused_area(cfg: DictConfig, module: Any) -> None:
    """Warn if max_area on the command line has no effect."""
    images = module.condition_images
    most = images.vae_image_size or images.most_area or math.inf
    if is_given("max_area") and cfg.max_area and (cfg.image is None or cfg.max_area > most):
        limit = "no image is shrunk to it" if cfg.image is None else f"{module.base.name} sees at most {most} pixels"
        log.warning(f"note: max_area={cfg.max_area} has no effect: {limit}")


def warn_of_other_base(module: Any, files: list[Path], headers: list[dict[str, Any]]) -> None:
    """Warn if a LoRA was trained on another base or precision, or with other encoder settings."""
    if not any(headers):
        return
    provenance = module.base.provenance()
    here = {key: value for key, value in provenance.items() if key != "transformer"} | module.encoding_settings()
    for file, header in zip(files, headers, strict=True):
        trained = {**header.get("model", {}), **header}
        for key in dict.fromkeys([*here, *(key for key in header if key.endswith("_precision"))]):
            # Encoders without a precision of their own have the model's dtype.
            plain = key.endswith("_precision") and key != "base_precision"
            before = trained.get(key, trained.get("dtype", ...) if plain else ...)
            now = published(here.get(key, str(module.base.dtype)[6:]), str(trained.get("name")))
            if before is not ... and before != now:
                log.warning(f"note: {file} was trained on {key} {before}, this is {now}")
