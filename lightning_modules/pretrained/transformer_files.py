"""The files of a transformer, in a whole pipeline's repository or in one of its own."""

from typing import Any

from datamodules.errors import UserError
from lightning_modules.pretrained.component_files import indexed_files, read_json
from lightning_modules.pretrained.repository import repository_file
from lightning_modules.pretrained.weights import SafetensorsWeights, refuse_method

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


def transformer_config(repository: str, revision: str | None = None) -> dict[str, Any]:
    """The transformer's config.json, from its subfolder or from a repository that holds nothing else."""
    for filename in ("transformer/config.json", "config.json"):
        if path := repository_file(repository, filename, revision):
            config = read_json(path)
            refuse_method(config, repository, "bitsandbytes|retouch_.*|(fp|float)8.*")
            return config | {"_subfolder": filename.rpartition("/")[0] or None}
    raise UserError(f"{repository} has neither transformer/config.json nor config.json: it holds no transformer")


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("_subfolder", "quantization_config")}


def transformer_weights(repository: str, revision: str | None = None) -> SafetensorsWeights | None:
    """The transformer's weights on disk, downloaded if need be; None where they are no safetensors files.

    Raises:
        UserError: a shard is missing or damaged.
    """
    folder = transformer_config(repository, revision)["_subfolder"]
    start = f"{folder}/" if folder else ""
    index = repository_file(repository, f"{start}{WEIGHTS_FILE}.index.json", revision)
    names = [WEIGHTS_FILE] if index is None else indexed_files(index)
    files = [repository_file(repository, start + name, revision) for name in names]
    if index is None and files == [None]:
        return None
    for name, file in zip(names, files, strict=True):
        if file is None:
            raise UserError(f"{repository} lacks {start}{name}: the download is incomplete; download it again")
    return SafetensorsWeights([file for file in files if file is not None])


def empty_transformer(cls: type[Any], config: dict[str, Any]) -> Any:
    """A transformer of this config.json, its parameters on the meta device."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return cls.from_config(settings_of(config))
