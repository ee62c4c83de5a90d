"""The model of LoRA files, found by name, header or layers, and built without network and weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from foundation.catalogue import catalogue, shipped_configuration
from foundation.errors import UserError, printable
from foundation.files import reading
from foundation.settings import flat_settings
from lightning_modules.edit_module import EditModule
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained.repository import EMBEDDED, SUFFIXES
from runs.config_file import read_config

# Settings of `model` that name files or folders.
SOURCES = (
    *(f"{part}_name_or_path" for part in ("pretrained_model", "transformer", "text_encoder", "vae")),
    "comfyui",
)


class KnownModel(NamedTuple):
    """A model whose layers are known."""

    name: str  # of its YAML
    base: str  # its folder or hub id
    names: LayerNames  # of its transformer's layers
    settings: DictConfig  # of `model` in conf/predict.yaml
    guessed: bool = False  # whether it was found by the file's layers alone


def model_for(cfg: DictConfig, files: Sequence[LoRAFile]) -> KnownModel:
    """Return the model of model=, of the first header, or that the files fit; raise a UserError without one."""
    overrides = HydraConfig.get().overrides.task
    chosen = is_given("model")
    trained = (files[0].header.get("model") or {}) if files else {}
    if chosen or trained:
        name = HydraConfig.get().runtime.choices["model"] if chosen else str(trained.get("name"))
        try:
            return _known(name, model_settings(cfg, [header_here(file) for file in files], overrides))
        except UserError:
            if chosen:
                raise  # else the base is not on this machine, and its layers are those of one that is known
    known = next(fitting_models(files), None)
    if known is not None:
        return known
    for file in files:
        file.empty  # noqa: B018 (a file that is no LoRA at all says so)
    raise UserError(
        f"the LoRA {files[0].path} fits none of the models that Retouch knows: pass model=NAME "
        "model.pretrained_model_name_or_path=FOLDER"
    )


def is_given(key: str) -> bool:
    """Return whether the command sets a key or chooses a group's file."""
    return any(override.startswith(f"{key}=") for override in HydraConfig.get().overrides.task)


def fitting_models(files: Sequence[LoRAFile]) -> Iterator[KnownModel]:
    """Return the models of `known_models` that all files fit."""
    for known in known_models():
        with suppress(UserError):
            for file in files:
                file.match(known.names, known.base)
            yield known


@cache
def known_models() -> list[KnownModel]:
    """Return the models of conf/model with the bases that their YAMLs name, each base once."""
    found: dict[str, KnownModel] = {}
    for name in catalogue():
        known = _known(name, hydra.compose("predict", overrides=[f"model={name}"]).model)
        found.setdefault(known.base, known._replace(guessed=True))
    return list(found.values())


def _known(name: str, settings: DictConfig) -> KnownModel:
    module = without_network(settings)
    return KnownModel(name, module.base.name, module.base.layer_names, settings)


def without_network(model: DictConfig) -> EditModule:
    """Build the module of these settings; a known model's configuration is read from assets/."""
    name = model.pretrained_model_name_or_path
    module = instantiate(model, pretrained_model_name_or_path=str(shipped_configuration(name) or name), _convert_="all")
    if module.base.transformer_name == module.base.name:
        module.base.transformer_name = name
    module.base.name = name
    return module


def header_here(file: LoRAFile) -> dict[str, Any]:
    """Return a LoRA's header; in its run's folder with this machine's paths, which only config.yaml contains."""
    header, folders = file.header, file.path.absolute().parents
    config = folders[2] / "config.yaml" if len(folders) > 2 else file.path
    if not (header.get("model") and config.name == "config.yaml" and config.is_file()):
        return header
    with reading(config, "remove it, and name the base by model.pretrained_model_name_or_path"):
        settings = dict(read_config(config).get("model") or {})
    paths = {key: one for key, one in flat_settings(settings).items() if _texts(one) and all(map(exists, _texts(one)))}
    return header | {"model": {key: paths.get(key, one) for key, one in flat_settings(header["model"]).items()}}


def model_settings(cfg: DictConfig, headers: Sequence[Mapping[str, Any]], overrides: list[str]) -> DictConfig:
    """Return the settings of the model that the first LoRA was trained on, with those of the command line."""
    trained = flat_settings((headers[0].get("model") if headers else None) or {})
    if any(override.startswith("model=") for override in overrides) or not trained:
        return cfg.model
    name = str(trained.get("name"))
    if name not in catalogue():
        short = printable(name[:150])
        raise UserError(f"the LoRA was trained with model={short}, which is not in conf/model: pass model=NAME")
    own = [override for override in overrides if override.startswith(("model.", "model/"))]
    if any(override.startswith("model/quantization=") for override in own):
        trained = {key: value for key, value in trained.items() if not key.startswith("quantization.")}
    elif any(key.startswith("quantization.") for key in trained):  # any of them: its values come from the header
        own.append("model/quantization=fp8")
    model = hydra.compose("predict", overrides=[f"model={name}", *own]).model
    given = {override.split("=")[0].removeprefix("model.").removeprefix("model/") for override in own}
    for key, value in trained.items():
        # A file from elsewhere may set values, never what is called or looked up.
        private = any(part.startswith("_") for part in key.split("."))
        usual = OmegaConf.select(model, key, default=...)
        same_kind = usual is None or value is None or isinstance(value, str) == isinstance(usual, str)
        if _plain(value) and not private and key not in given and usual is not ... and same_kind:
            OmegaConf.update(model, key, value, merge=False)
    missing = {
        key: name
        for key in SOURCES
        for name in _texts(model[key])
        if "/" not in name and name != EMBEDDED and not exists(name)
    }
    if missing:
        kinds = {key: "FILE" if Path(name).suffix.lower() in SUFFIXES else "FOLDER" for key, name in missing.items()}
        raise UserError(
            f"the LoRA was trained on {printable(', '.join(missing.values())[:150])} of the machine that trained it: "
            f"pass {' '.join(f'model.{key}={kind}' for key, kind in kinds.items())}"
        )
    return model


def _texts(value: Any) -> list[str]:
    """Return a setting's texts, one or a list; none for other values."""
    values = [*value] if isinstance(value, list | ListConfig) else [value]
    return values if all(isinstance(one, str) for one in values) else []


def _plain(value: Any) -> bool:
    """Return whether a value of a header is a plain value: interpolations would look things up."""
    if isinstance(value, list):
        return all(isinstance(one, str) and _plain(one) for one in value)
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and "${" not in value)
