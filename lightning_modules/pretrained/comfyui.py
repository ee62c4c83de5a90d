"""A folder of ComfyUI in place of repositories: a model's files, found below models/ by their tensors and names."""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from glob import escape, glob
from pathlib import Path
from typing import Any

from foundation.catalogue import CONFIGURATIONS, shipped_configuration
from foundation.errors import UserError, listing
from foundation.notes import note_once
from lightning_modules.family import Family
from lightning_modules.pretrained.checks import NAME_FILES, read_json
from lightning_modules.pretrained.component_files import open_components
from lightning_modules.pretrained.repository import SUFFIXES, read_index, resolve_repository, with_weights
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.settings import ModelSettings

# Subfolders of models/ by the beginning of the components' names: ComfyUI's own and its older ones.
FOLDERS = {
    "transformer": ("diffusion_models", "unet"),
    "text_encoder": ("text_encoders", "clip"),
    "vae": ("vae",),
}
# Words in the names of other models' files with equal tensors: Qwen-Image's autoencoder was trained from Wan's.
OTHERS = {"wan"}


def with_comfyui(settings: ModelSettings, family: type[Family], source: TransformerSource) -> ModelSettings:
    """Return the settings with the files in settings.comfyui for the components that they do not name.

    Args:
        source: the source of the transformer, under another name.

    Raises:
        UserError: it is not a folder of ComfyUI, or not exactly one file fits a component.
    """
    if settings.comfyui is None:
        return settings
    base, folder = settings.pretrained_model_name_or_path, Path(settings.comfyui).expanduser()
    if Path(base).parent == CONFIGURATIONS:
        base = Path(base).name.replace("--", "/", 1)
    models = folder / "models" if (folder / "models").is_dir() else folder
    if not any((models / name).is_dir() for names in FOLDERS.values() for name in names):
        raise UserError(f"model.comfyui={settings.comfyui}: models/diffusion_models is missing. Correct the path.")
    repository = str(shipped_configuration(base) or resolve_repository(base)), settings.revision
    needed = with_weights(read_index(*repository))

    def components_in(path: Path, kind: str) -> Collection[str]:
        """Return the names of the components that a file fits."""
        with suppress(UserError):
            if kind != "transformer":
                return open_components({kind: [str(path)]}, *repository)
            replace(source, name=str(path)).weights()
            return [kind]
        return []

    found: dict[str, Any] = {}
    for kind, folders in FOLDERS.items():
        key = f"{kind}_name_or_path"
        if getattr(settings, key) is None:
            files = [path for one in folders for path in _files(models / one)]
            named = [path for path in files if _is_named_for(path, base, family if kind == "transformer" else None)]
            fitting = {str(path.relative_to(models)): components_in(path, kind) for path in named}
            chosen: dict[str, str] = {}
            for part in [name for name in needed if name.startswith(kind)]:
                several = [name for name, parts in fitting.items() if part in parts]
                if len(several) != 1:
                    seen = f" ({listing([path.name for path in files])})" if files else ""
                    none = f"no file in {models / folders[0]}{seen} fits by its name and tensors as"
                    problem = f"{listing(several)} all fit as" if several else none
                    fix = f"Name one by model.{key}=FILE; {NAME_FILES}."
                    raise UserError(f"model.comfyui: {problem} {part} of {base}. {fix}")
                chosen |= {several[0]: str(models / several[0])}
            found[key] = [*chosen.values()] if kind == "text_encoder" else next(iter(chosen.values()))
            note_once(f"{listing([*chosen])} of {models}: used as {kind}")
    return replace(settings, **found)


def _files(folder: Path) -> list[Path]:
    """Return the files of weights below a folder; unlike Path.rglob, glob follows links to folders."""
    names = sorted(glob(f"{escape(str(folder))}/**", recursive=True))
    return [Path(name) for name in names if name.lower().endswith(SUFFIXES)]


def _is_named_for(path: Path, base: str, family: type[Family] | None) -> bool:
    """Return whether a file's name does not say that it is of another model than the base.

    A transformer's has the words that another model's name lacks (kontext), and none that only that has (turbo).

    Args:
        family: the transformer's; None for another component.
    """
    file = _words(path.stem)
    if family is None or Path(base).is_dir():
        return not file & OTHERS
    indexes = {path.parent.name: read_json(path) for path in CONFIGURATIONS.glob("*/*model_index.json")}
    names = [name for name, index in indexes.items() if index["transformer"][1] == family.transformer_class]
    others = [_words(name.split("--")[1]) for name in names if name != base.replace("/", "--")]
    own = _words(base.rpartition("/")[2])
    return all(own - other <= file and not (other - own) & file for other in others)


def _words(name: str) -> set[str]:
    """Split a name into words: FLUX.1-Kontext-dev -> flux, 1, kontext, dev."""
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}
