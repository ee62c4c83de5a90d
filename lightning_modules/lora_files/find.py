"""Find a LoRA's weights: in a run's folder, a weights folder, a file, or on huggingface.co."""

import re
from pathlib import Path

from datamodules.errors import UserError, listing
from datamodules.hub import repository_file

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"

# owner/name, or owner/name/FILE.
ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+?)(?:/(.+\.safetensors))?", re.ASCII)


def find_weights(lora: str | Path) -> Path:
    """Return the weights file of a run's folder or a weights folder, or the file itself."""
    path = Path(lora).expanduser()
    candidates = [path, path / WEIGHTS_NAME, path / "lora" / "last" / WEIGHTS_NAME, path / PEFT_WEIGHTS_NAME]
    if found := next((candidate for candidate in candidates if candidate.is_file()), None):
        return found
    if not path.exists():
        raise UserError(f"LoRA weights {path}: no such file or folder")
    if (path / "model" / "last").is_dir():
        raise UserError(
            f"LoRA weights {path}: this run trained all weights. Replace lora= by model=NAME "
            f"model.pretrained_model_name_or_path={path / 'model' / 'last'}"
        )
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise UserError(f"LoRA weights {path}: the folder contains neither {WEIGHTS_NAME} nor lora/last/{WEIGHTS_NAME}")


def find_or_download(lora: str | Path) -> Path:
    """Return a local weights file as `find_weights`, else one of the hub: `owner/name` or `owner/name/FILE`."""
    match = ON_THE_HUB.fullmatch(str(lora))
    if match is None or Path(lora).expanduser().exists():
        return find_weights(lora)
    repository, filename = match.groups()
    if filename is None:
        names = _names_on_the_hub(repository)
        if len(names) > 1 and WEIGHTS_NAME not in names:
            raise UserError(f"{repository} contains {listing(names, 6)}. Choose one, as in {repository}/{names[0]}")
        filename = names[0] if len(names) == 1 else WEIGHTS_NAME
    path = repository_file(repository, filename)
    if path is None:
        raise UserError(f"{repository} has no {filename}. Name an existing file as {repository}/FILE.safetensors")
    return path


def _names_on_the_hub(repository: str) -> list[str]:
    """List a repository's safetensors files; without a network those in the cache; empty if neither is available."""
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(repository, allow_patterns="*.safetensors", dry_run=True)
        return sorted(one.filename for one in found)
    except (OSError, ValueError):  # repository_file reports the reason
        pass
    try:
        folder = Path(snapshot_download(repository, allow_patterns="*.safetensors", local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return []
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
