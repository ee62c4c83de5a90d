"""Where a LoRA's weights are."""

from pathlib import Path

from datamodules.errors import UserError

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"


def find_weights(lora: str | Path) -> Path:
    """The weights file of a run's folder, a weights folder, or the file itself.

    Raises:
        UserError: there is none.
    """
    path = Path(lora).expanduser()
    candidates = [path, path / WEIGHTS_NAME, path / "lora" / "last" / WEIGHTS_NAME, path / PEFT_WEIGHTS_NAME]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if not path.exists():
        raise UserError(f"LoRA weights {path}: no such file or folder")
    if (path / "sweep.csv").is_file():
        raise UserError(f"LoRA weights {path}: this is a sweep; name one of its jobs, such as {path / '0'}")
    if (path / "model" / "last").is_dir():
        raise UserError(
            f"LoRA weights {path}: this run trained all weights: in place of lora= pass model=NAME "
            f"model.pretrained_model_name_or_path={path / 'model' / 'last'}"
        )
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise UserError(f"LoRA weights {path}: the folder has neither {WEIGHTS_NAME} nor lora/last/{WEIGHTS_NAME}")
