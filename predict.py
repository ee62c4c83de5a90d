"""Edit pictures with a trained LoRA: `python predict.py --help` tells how."""

import contextlib
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.filesize import decimal

from callbacks.signals import stop
from datamodules.errors import UserError, listing
from datamodules.files import replacing_folder
from tasks.folders import LOCK, in_use, shorten
from tasks.settings import PREDICTION, check_settings
from tasks.terminal import (
    command_line,
    end_workers,
    log,
    one_line_errors,
    quote_values,
    silence_libraries,
)
from train import CONF, build_cache, place_trainer

if TYPE_CHECKING:
    import torch

    from datamodules.cached import CachedDataModule

# Samples that task=compare_precision looks at.
EXAMPLES = 4


def as_list(cfg: DictConfig, key: str) -> list[Any]:
    """A setting that may be one value or several."""
    value = cfg[key]
    values = list(value) if isinstance(value, ListConfig) else [value]
    if not values:
        raise UserError(f"{key}=[]: the list is empty")
    return values


def model_settings(cfg: DictConfig, headers: list[dict[str, Any] | None], overrides: list[str]) -> DictConfig:
    """The model that the LoRA was trained on; what the command line says of the model goes before it."""
    trained = ((headers or [None])[0] or {}).get("model")
    if any(override.startswith("model=") for override in overrides) or not trained:
        return cfg.model
    own = [override for override in overrides if override.startswith(("model.", "model/"))]
    quantization = trained.get("quantization") or {}
    if any(override.startswith("model/quantization=") for override in own):
        quantization = {}
    elif quantization:  # any of them: its values come from the header
        own.append("model/quantization=fp8")
    name = str(trained.get("name"))
    if not (CONF / "model" / f"{name}.yaml").is_file() or "/" in name:
        raise UserError(f"the LoRA was trained with model={name}, which is not in conf/model: pass model=NAME")
    model = hydra.compose("predict", overrides=[f"model={name}", *own]).model
    given = {override.split("=")[0].removeprefix("model.").removeprefix("model/") for override in own}
    if "quantization.format" in given:
        quantization = {key: value for key, value in quantization.items() if key != "backend"}
    settings = trained | {f"quantization.{key}": value for key, value in quantization.items()}
    for key, value in settings.items():
        # A file from elsewhere may set values, never what is called or looked up.
        private = any(part.startswith("_") for part in key.split("."))
        if _plain(value) and not private and key not in given and OmegaConf.select(model, key, default=...) is not ...:
            OmegaConf.update(model, key, value, merge=False)
    return model


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, str) and _plain(one) for one in value)
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and "${" not in value)


def warn_of_other_base(module: Any, files: list[Path], headers: list[dict[str, Any] | None]) -> None:
    """A LoRA fits the base that it was trained on, the base's precision, and what the encoders were told."""
    if not any(headers):
        return
    provenance = module.provenance()
    here = {key: value for key, value in provenance.items() if key != "transformer"} | module.encoding_settings()
    for file, header in zip(files, headers, strict=True):
        if header is None:
            continue
        trained = {**header.get("model", {}), **header}
        for key in dict.fromkeys([*here, *(key for key in header if key.endswith("_precision"))]):
            # Encoders whose precision is not told have the model's dtype.
            plain = key.endswith("_precision") and key != "base_precision"
            before = trained.get(key, trained.get("dtype", ...) if plain else ...)
            now = here.get(key, str(module.base_dtype)[6:])
            if before is not ... and before != now:
                log.warning(f"note: {file} was trained on {key} {before}, this is {now}")


def edit(cfg: DictConfig, overrides: list[str], output_dir: Path) -> None:
    """Make the pictures."""
    import lightning.pytorch as L
    from hydra.utils import instantiate

    from callbacks.graceful_stop import GracefulStop
    from callbacks.image_writer import ImageWriter
    from callbacks.rank_schedule import RankMasks
    from datamodules.edits import EditsDataModule
    from lightning_modules.adapters.formats.diffusers import find_weights, read_header
    from lightning_modules.family import Sampling

    if (output_dir / "predictions.jsonl").exists():
        raise UserError(f"output_dir={output_dir} holds predictions: choose another folder")
    if cfg.lora is None:
        log.info(f"no lora=: the model alone ({cfg.model.pretrained_model_name_or_path})")
    files = [find_weights(lora) for lora in as_list(cfg, "lora")] if cfg.lora is not None else []
    headers = [read_header(file) for file in files]
    cfg.model = model_settings(cfg, headers, overrides)
    check_settings(cfg, PREDICTION)  # what the file's header says too
    scales = list(dict.fromkeys(map(float, as_list(cfg, "lora_scale"))))
    if not files and scales != [1.0]:
        raise UserError("lora_scale needs lora=: name the weights that it scales")
    for key in ("image", "prompts_file"):
        if isinstance(cfg[key], ListConfig):
            raise UserError(f'{key}={cfg[key]}: give one; several images are a folder or a glob, as "folder/*.jpg"')
    sampling = Sampling(cfg.num_inference_steps, cfg.guidance_scale, cfg.true_cfg_scale, cfg.negative_prompt)
    if sampling.negative is not None and cfg.negative_prompt is None:
        log.info('true_cfg_scale above 1 needs a negative_prompt; using ""')
    data = EditsDataModule(
        image=cfg.image,
        prompt=None if cfg.prompt is None else [str(prompt) for prompt in as_list(cfg, "prompt")],
        prompts_file=cfg.prompts_file,
        negative_prompt=sampling.negative,
        seeds=list(dict.fromkeys(seed + i for seed in as_list(cfg, "seed") for i in range(cfg.num_images_per_prompt))),
        lora_scales=scales,
        height=cfg.height,
        width=cfg.width,
        max_area=cfg.max_area,
        batch_size=cfg.batch_size,
    )
    # Hydra would turn objects among its arguments into configs: finish the call without it.
    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, _partial_=True)(
        loras=files, merge_lora=cfg.merge_lora, sampling=sampling
    )
    warn_of_other_base(module, files, headers)
    silence_libraries()
    place_trainer(cfg)
    callbacks = [RankMasks(), ImageWriter(str(output_dir)), GracefulStop()]
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False)
    try:
        trainer.predict(module, datamodule=data, return_predictions=False)
    except BaseException as error:
        if (output_dir / "predictions.jsonl").exists():
            error.add_note(f"finished pictures are in {output_dir}")
        raise


def cached_data(cfg: DictConfig) -> "CachedDataModule":
    """The data of a task that is about data.root."""
    from hydra.utils import instantiate

    from datamodules.cached import CachedDataModule

    data = instantiate(cfg.data, _convert_="all")
    silence_libraries()
    if not isinstance(data, CachedDataModule) or data.shards is not None:
        raise UserError(f"task={cfg.task} is about data.root: leave data=cached and data.shards as they are")
    return data


def cache(cfg: DictConfig, overrides: list[str]) -> None:
    """Encode data.root, as train.py does before it trains."""
    from datamodules.shards.cache import Cache

    place_trainer(cfg)
    folder = build_cache(cfg, data := cached_data(cfg))
    manifest = Cache(folder, {}).manifest()
    if not manifest.get("samples"):
        raise UserError(f"data.root={listing([str(root) for root in data.roots])}: no usable pair is left")
    log.info(f"done: {folder} holds {manifest['samples']} samples, {decimal(manifest['bytes'])}")
    same = [shlex.quote(override) for override in overrides if re.match(r"(data|model)[.=]", override)]
    log.info(f"train on it: {' '.join(['python train.py', *same])}")


def preview(cfg: DictConfig, output_dir: Path) -> None:
    """Show what would be trained on, without any model."""
    from hydra.utils import instantiate

    from tasks.contact_sheet import write_contact_sheet

    data = cached_data(cfg)
    data.serve(instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None))
    data.scan()
    write_contact_sheet(data, output_dir / "preview.png")
    for note in data.notes:
        log.info(f"note: {note}")
    log.info(f"done: {output_dir / 'preview.png'}")


def clean(cfg: DictConfig) -> None:
    """Name the caches that the present settings do not use, and delete them if told to."""
    from hydra.utils import instantiate

    from datamodules.shards.cache import Cache

    data = cached_data(cfg)
    used = data.cache(instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None)).folder
    total = 0
    for folder in sorted(used.parent.glob("?" * len(used.name))):
        if folder == used or not (folder / ".lock").is_file():
            continue
        other = Cache(folder, {})
        if not other.lock_is_free():
            log.info(f"{folder} is being filled: it stays")
            continue
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        when = time.strftime("%Y-%m-%d", time.localtime((folder / ".lock").stat().st_mtime))
        total += size
        log.info(f"{folder}  {decimal(size)}, {other.describe()}, last used {when}")
        if cfg.delete:
            shutil.rmtree(folder)
    if total == 0:
        log.info(f"nothing to free in {used.parent}; {used.name} is what these settings use")
    elif cfg.delete:
        log.info(f"freed {decimal(total)}; kept {used.name}, which these settings use")
    else:
        log.info(f"delete=true frees {decimal(total)}; {used.name}, which these settings use, stays")


def quantize(cfg: DictConfig, overrides: list[str], output_dir: Path) -> None:
    """Write the transformer as its settings quantize it."""
    from hydra.utils import instantiate

    from lightning_modules.pretrained.weights import WRITTEN_BACKENDS, save_quantized

    silence_libraries()
    device = compute_device(cfg)
    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, sampling=None)
    quantization = module.source.quantization
    if quantization is None:
        raise UserError(
            "task=quantize needs a model that quantizes: model=flux_kontext_fp8, model/quantization=fp4, ..."
        )
    if quantization.backend not in WRITTEN_BACKENDS:
        raise UserError(
            f"task=quantize cannot write {quantization.backend}'s layers: leave model.quantization.backend out"
        )
    if any(path.name != LOCK for path in output_dir.iterdir()):  # it is replaced as a whole
        raise UserError(f"output_dir={output_dir} is not empty: choose another folder")
    module.preflight()
    module.source.check_unquantized("task=quantize")
    transformer = module.to(device).load_transformer()
    with replacing_folder(output_dir) as unfinished:
        save_quantized(transformer, quantization, unfinished)
    files = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    log.info(f"{output_dir} holds {quantization.format}, {decimal(files)}")
    same = [shlex.quote(override) for override in overrides if re.match(r"model[./=](?!transformer_name)", override)]
    log.info(f"train on it: {' '.join(['python train.py', *same, f'model.transformer_name_or_path={output_dir}'])}")


def compare_precision(cfg: DictConfig, output_dir: Path) -> None:
    """Show what each way to quantize does to the velocity."""
    from hydra.utils import instantiate

    from datamodules.batch import LatentBatch
    from lightning_modules.quantization.quantization import BACKENDS
    from tasks.compare_precision import compare_precision

    silence_libraries()  # before a trainer is made
    device = compute_device(cfg)
    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None)
    module.preflight()
    module.source.check_unquantized("task=compare_precision")
    build_cache(cfg, data := cached_data(cfg))
    data.serve(module)
    data.open(data.cache(module))
    settings = cfg.model.quantization or OmegaConf.load(CONF / "model" / "quantization" / "fp8.yaml")
    alone = {"backend": None, "components_to_quantize": ["transformer"]}
    quantizations = [instantiate(settings, format=format, **alone) for format in BACKENDS]
    examples = [example.batch for example in data.examples(EXAMPLES, empty_prompt=False)]
    batches = [batch for batch in examples if isinstance(batch, LatentBatch)]
    compare_precision(module.to(device), quantizations, batches, output_dir / "precision.png")


def compute_device(cfg: DictConfig) -> "torch.device":
    """Where the trainer would compute, for a task that goes without one."""
    from hydra.utils import instantiate

    place_trainer(cfg)
    return instantiate(cfg.trainer, logger=False).strategy.root_device


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def run(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    overrides = list(HydraConfig.get().overrides.task)
    # The others write elsewhere: into the cache.
    writes = cfg.task in ("edit", "preview", "quantize", "compare_precision")
    try:
        with one_line_errors(), stop.listening(), in_use(output_dir) if writes else contextlib.nullcontext():
            check_settings(cfg, PREDICTION)
            if cfg.task == "edit":
                edit(cfg, overrides, output_dir)
                log.info(f"done: {output_dir}")
            elif cfg.task == "cache":
                cache(cfg, overrides)
            elif cfg.task == "preview":
                preview(cfg, output_dir)
            elif cfg.task == "clean":
                clean(cfg)
            elif cfg.task == "quantize":
                quantize(cfg, overrides, output_dir)
            elif cfg.task == "compare_precision":
                compare_precision(cfg, output_dir)
                log.info(f"done: {output_dir / 'precision.png'}")
            else:
                raise UserError(f"task={cfg.task}: choose edit, cache, preview, clean, quantize or compare_precision")
            stop.check()
    finally:
        end_workers()
        with contextlib.suppress(OSError):  # not there, or not empty
            output_dir.rmdir()


def main() -> None:
    """The command line."""
    with command_line():
        sys.argv[1:] = quote_values(sys.argv[1:])
        run()


if __name__ == "__main__":
    main()
