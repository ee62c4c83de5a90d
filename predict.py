"""Edit pictures with a trained LoRA: `python predict.py --help` tells how."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from callbacks.console import configure_logging, log, one_line_errors, quote_values, silence_libraries
from datamodules.errors import UserError
from train import CONF, place_trainer, shorten

OmegaConf.register_new_resolver(
    "prediction_folder",
    lambda: time.strftime("outputs/prediction_%Y-%m-%d_%H-%M-%S"),
    use_cache=True,
    replace=True,
)


def as_list(value: Any) -> list[Any]:
    """A setting that may be one value or several."""
    return list(value) if isinstance(value, ListConfig | list) else [value]


def numbers(cfg: DictConfig, key: str, kind: type[int] | type[float]) -> list[Any]:
    """A setting of one or several numbers."""
    try:
        return [kind(value) for value in as_list(cfg[key])]
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}={cfg[key]}: must be a number, or a list of them") from error


def model_settings(cfg: DictConfig, headers: list[dict[str, Any] | None], overrides: list[str]) -> DictConfig:
    """The model that the LoRA was trained on; what the command line says of the model goes before it."""
    if any(override.startswith("model=") for override in overrides) or not headers or headers[0] is None:
        return cfg.model
    trained = headers[0]["model"]
    own = [override for override in overrides if override.startswith("model.")]
    name = str(trained.get("name"))
    if not (CONF / "model" / f"{name}.yaml").is_file() or "/" in name:
        raise UserError(f"the LoRA was trained with model={name}, which is not in conf/model: pass model=NAME")
    model = hydra.compose("predict", overrides=[f"model={name}", *own]).model
    given = {override.split("=")[0].removeprefix("model.") for override in own}
    for key, value in trained.items():
        # A file from elsewhere may set values, never what is called or looked up.
        plain = value is None or isinstance(value, int | float) or (isinstance(value, str) and "${" not in value)
        if key in model and key not in given and plain and not key.startswith("_"):
            model[key] = value
    return model


def warn_of_other_base(cfg: DictConfig, files: list[Path], headers: list[dict[str, Any] | None]) -> None:
    """A LoRA fits the base that it was trained on, and the base's precision too."""
    here = {
        "base": cfg.model.pretrained_model_name_or_path,
        "base_precision": cfg.model.dtype,
    }
    for file, header in zip(files, headers, strict=True):
        for key, value in here.items():
            if header is not None and header[key] != value:
                log.warning(f"note: {file} was trained on {key} {header[key]}, this is {value}")


def predict(cfg: DictConfig, overrides: list[str], output_dir: Path) -> None:
    """Run the composed task."""
    import lightning.pytorch as L
    from hydra.utils import instantiate

    from callbacks.image_writer import ImageWriter
    from datamodules.edits import EditsDataModule
    from lightning_modules.family import Sampling
    from lightning_modules.lora import find_weights, read_header

    if (output_dir / "predictions.jsonl").exists():
        raise UserError(f"output_dir={output_dir} holds predictions: choose another folder")
    if cfg.lora is None:
        log.info(f"no lora=: the model alone ({cfg.model.pretrained_model_name_or_path})")
    files = [find_weights(lora) for lora in as_list(cfg.lora)] if cfg.lora is not None else []
    headers = [read_header(file) for file in files]
    cfg.model = model_settings(cfg, headers, overrides)
    warn_of_other_base(cfg, files, headers)
    scales = numbers(cfg, "lora_scale", float)
    if not files and scales != [1.0]:
        raise UserError("lora_scale needs lora=: name the weights that it scales")
    for key in ("num_inference_steps", "num_images_per_prompt"):
        if not isinstance(cfg[key], int) or cfg[key] < 1:
            raise UserError(f"{key}={cfg[key]}: must be a whole number from 1 on")
    count = cfg.num_images_per_prompt
    sampling = Sampling(cfg.num_inference_steps, cfg.guidance_scale, cfg.true_cfg_scale, cfg.negative_prompt or "")
    if sampling.uses_negative and cfg.negative_prompt is None:
        log.info('true_cfg_scale above 1 needs a negative_prompt; using ""')
    data = EditsDataModule(
        image=cfg.image,
        prompt=None if cfg.prompt is None else [str(prompt) for prompt in as_list(cfg.prompt)],
        prompts_file=cfg.prompts_file,
        negative_prompt=sampling.negative_prompt if sampling.uses_negative else None,
        seeds=list(dict.fromkeys(seed + i for seed in numbers(cfg, "seed", int) for i in range(count))),
        lora_scales=scales,
        height=cfg.height,
        width=cfg.width,
        max_area=cfg.max_area,
    )
    # Hydra would turn objects among its arguments into configs: finish the call without it.
    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, _partial_=True)(
        loras=files, sampling=sampling
    )
    silence_libraries()
    place_trainer(cfg)
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=[ImageWriter(str(output_dir))], logger=False)
    try:
        trainer.predict(module, datamodule=data, return_predictions=False)
    finally:
        if trainer.interrupted:
            log.info(f"interrupted; finished pictures are in {output_dir}")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def run(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    configure_logging()
    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    try:
        with one_line_errors():
            predict(cfg, list(HydraConfig.get().overrides.task), output_dir)
            log.info(f"done: {output_dir}")
    finally:
        with contextlib.suppress(OSError):  # not there, or not empty
            output_dir.rmdir()


def main() -> None:
    """The command line."""
    sys.argv[1:] = quote_values(sys.argv[1:])
    run()


if __name__ == "__main__":
    main()
