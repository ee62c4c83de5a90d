"""Edit pictures with a trained LoRA: `python predict.py --help` tells how."""

import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from train import CONF, place_trainer, shorten

FREE_TEXT = ("prompt", "negative_prompt", "image", "prompts_file")

OmegaConf.register_new_resolver(
    "prediction_folder",
    lambda: time.strftime("outputs/prediction_%Y-%m-%d_%H-%M-%S"),
    use_cache=True,
    replace=True,
)


def quote_text(argument: str) -> str:
    """`prompt=snow, please` -> `prompt="snow, please"`; what is quoted, a list or null stays as it is."""
    key, _, value = argument.partition("=")
    if key not in FREE_TEXT or value in ("", "null") or value[0] in "'\"[":
        return argument
    return f'{key}="' + value.replace('"', '\\"') + '"'


def as_list(value: Any) -> list[Any]:
    """A setting that may be one value or several."""
    return list(value) if isinstance(value, ListConfig | list) else [value]


def model_settings(cfg: DictConfig, headers: list[dict[str, Any] | None], overrides: list[str]) -> DictConfig:
    """The model that the LoRA was trained on; what the command line says of the model goes before it."""
    if any(override.startswith("model=") for override in overrides) or not headers or headers[0] is None:
        return cfg.model
    trained = dict(headers[0]["model"])
    own = [override for override in overrides if override.startswith("model.")]
    composed = hydra.compose("predict", overrides=[f"model={trained.pop('name')}", *own])
    given = OmegaConf.from_dotlist(own)
    return OmegaConf.merge(composed.model, trained, given.get("model", {}))  # type: ignore[return-value]


def warn_of_other_base(cfg: DictConfig, files: list[Path], headers: list[dict[str, Any] | None]) -> None:
    """A LoRA fits the base that it was trained on, and the base's precision too."""
    from callbacks.console import log

    here = {
        "base": cfg.model.pretrained_model_name_or_path,
        "base_precision": cfg.model.dtype,
    }
    for file, header in zip(files, headers, strict=True):
        for key, value in here.items():
            if header is not None and header[key] != value:
                log.warning(f"note: {file} was trained on {key} {header[key]}, this is {value}")


def predict(cfg: DictConfig, overrides: list[str], output_dir: Path) -> list[Path]:
    """Run the composed task; returns the files written."""
    import lightning.pytorch as L
    from hydra.utils import instantiate

    from callbacks.console import log, silence_libraries
    from callbacks.image_writer import ImageWriter
    from datamodules.edits import EditsDataModule
    from datamodules.errors import UserError
    from lightning_modules.family import Sampling
    from lightning_modules.lora import find_weights, read_header

    files = [find_weights(lora) for lora in as_list(cfg.lora)] if cfg.lora is not None else []
    headers = [read_header(file) for file in files]
    cfg.model = model_settings(cfg, headers, overrides)
    warn_of_other_base(cfg, files, headers)
    scales = [float(scale) for scale in as_list(cfg.lora_scale)]
    if not files and scales != [1.0]:
        raise UserError("lora_scale needs lora=: name the weights that it scales")
    negative = cfg.negative_prompt
    if cfg.true_cfg_scale > 1 and negative is None:
        negative = ""
        log.info('true_cfg_scale above 1 needs a negative_prompt; using ""')
    data = EditsDataModule(
        image=cfg.image,
        prompt=None if cfg.prompt is None else [str(prompt) for prompt in as_list(cfg.prompt)],
        prompts_file=cfg.prompts_file,
        negative_prompt=negative if cfg.true_cfg_scale > 1 else None,
        seeds=[int(s) + i for s in as_list(cfg.seed) for i in range(cfg.num_images_per_prompt)],
        lora_scales=scales,
        height=cfg.height,
        width=cfg.width,
        max_area=cfg.max_area,
    )
    sampling = Sampling(cfg.num_inference_steps, cfg.guidance_scale, cfg.true_cfg_scale, negative or "")
    # Hydra would turn objects among its arguments into configs: finish the call without it.
    module = instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, _partial_=True)(
        loras=files, sampling=sampling
    )
    silence_libraries()
    place_trainer(cfg)
    writer = ImageWriter(str(output_dir))
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=[writer], logger=False)
    trainer.predict(module, datamodule=data, return_predictions=False, weights_only=False)
    return writer.written


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def run(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from callbacks.console import configure_logging, log, one_line_errors

    configure_logging()
    output_dir = shorten(HydraConfig.get().runtime.output_dir)
    try:
        with one_line_errors():
            written = predict(cfg, list(HydraConfig.get().overrides.task), output_dir)
            log.info(f"{len(written)} pictures and predictions.jsonl in {output_dir}")
    finally:
        if output_dir.is_dir() and not any(output_dir.iterdir()):
            output_dir.rmdir()


def main() -> None:
    """The command line: prompts and paths may hold commas, quotes and brackets, which Hydra would read as its own."""
    sys.argv[1:] = map(quote_text, sys.argv[1:])
    run()


if __name__ == "__main__":
    main()
