"""Components of a diffusers repository (a folder or a hub id): their files, classes and configurations."""

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from foundation.errors import UserError
from foundation.files import PICKLES, kind_of_file
from foundation.hashes import FileHashes, hash_file
from foundation.hub import repository_file
from foundation.settings import ASSETS
from lightning_modules.pretrained.checks import NAME_FILES, SUFFIXES, files_in, read_json

log = logging.getLogger("retouch")

EMBEDDED = "embedded"
PHOTOS = ASSETS / "photos"
# A pipeline's index; the second one is a modular pipeline's.
INDEXES = ("model_index.json", "modular_model_index.json")
SINGLE_FILES = (*SUFFIXES, ".onnx", *PICKLES)
# Bytes of a file that takes a while to read.
LARGE = 10**9
# Words in the class names of components without weights.
WITHOUT_WEIGHTS = ("Tokenizer", "Processor", "Scheduler", "FeatureExtractor")


def resolve_repository(name: str) -> str:
    """Return the folder of a name (`embedded`: Retouch's own model) or a hub id; raise a UserError for neither."""
    path = PHOTOS if name == EMBEDDED else Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        what = f"is {kind_of_file(path) or f'a single {path.suffix[1:]} file'}, not a repository"
    elif path.suffix.lower() in SINGLE_FILES or name.startswith((".", "/", "~")):
        what = "is not there"
    else:
        return name
    layout = "Name a folder in diffusers' layout or such a repository on the hub (owner/name)"
    raise UserError(f"{name} {what}. {layout}; {NAME_FILES}")


def resolve_device(name: str | None, key: str) -> torch.device | None:
    """Parse a device name from the setting `key`; raise a UserError if this machine does not have it."""
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{key}={name} is not a device: use cpu, cuda, cuda:0, mps, ...") from error
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= available.get(device.type, 0):
        has = (f"{kind} ({count})" for kind, count in available.items() if count)
        raise UserError(f"{key}={name}: this machine has {', '.join(has)}")
    return device


def resolve_dtype(name: str, key: str = "model.dtype", *more: str) -> torch.dtype:
    """Parse `float32`, `bfloat16` or one of `more` from the setting `key`; raise a UserError for another name."""
    if name not in (choices := ("float32", "bfloat16", *more)):
        raise UserError(f"{key}={name}: choose {' or '.join(choices)}")
    return getattr(torch, name)


def component_folder(repository: str, revision: str | None, names: Iterable[str]) -> Path:
    """Return the repository as a local folder with these components, downloaded if necessary."""
    if Path(repository).is_dir():
        return Path(repository)
    from huggingface_hub import snapshot_download

    patterns = [*INDEXES, *(f"{name}/*" for name in names)]
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


def index_file(repository: str, revision: str | None = None) -> Path | None:
    """Return the path of a pipeline's index; None if there is none."""
    return next(filter(None, (repository_file(repository, name, revision) for name in INDEXES)), None)


def read_index(repository: str, revision: str | None = None) -> dict[str, Any]:
    """Read the index: each component's library, class and in a modular pipeline origin; errors as `repository_json`."""
    path = index_file(repository, revision)
    index = repository_json(repository, INDEXES[0] if path is None else path.name, revision)
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 3 and entry[0] is None:  # saved without being loaded
            index[name] = [*entry[2]["type_hint"], entry[2]]
    return index


def component_origin(repository: str, name: str, revision: str | None = None) -> tuple[str, str | None, str]:
    """Return a component's repository, revision and subfolder: the index may name another, also by a relative path."""
    entry = read_index(repository, revision).get(name, ())
    if len(entry) < 3 or Path(repository, name).is_dir():
        return repository, revision, name
    named, subfolder = entry[2]["pretrained_model_name_or_path"], entry[2]["subfolder"] or ""
    if named in (None, repository):
        return repository, revision, subfolder
    nearby = Path(repository, named)
    return str(nearby.resolve()) if nearby.is_dir() else named, entry[2]["revision"], subfolder


def component_config(repository: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """Read a component's config.json, without kernels of the hub, which are code; errors as in `repository_json`."""
    origin, revision, subfolder = component_origin(repository, name, revision)
    return _without_kernels(repository_json(origin, f"{subfolder}/config.json".lstrip("/"), revision))


def _without_kernels(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_kernels(value) for key, value in config.items() if "_implementation" not in key}


def repository_json(repository: str, filename: str, revision: str | None) -> dict[str, Any]:
    """Read a JSON file of a pipeline; raise a UserError if there is none, or as `repository_file`."""
    path = repository_file(repository, filename, revision)
    if path is None:
        layout = f"it must be a whole pipeline in diffusers' layout{files_in(repository)}"
        raise UserError(f"{repository} has no {filename}: {layout}")
    return read_json(path)


def with_weights(index: Mapping[str, Any]) -> list[str]:
    """Return the names of the components in an index that have weights."""
    classes = {name: entry[1] for name, entry in index.items() if isinstance(entry, list) and isinstance(entry[1], str)}
    return [name for name, kind in classes.items() if not any(word in kind for word in WITHOUT_WEIGHTS)]


def component_class(repository: str, name: str, revision: str | None = None) -> type[Any]:
    """Return the class of diffusers or transformers that the repository names for a component."""
    index = read_index(repository, revision)
    if name not in index:
        raise UserError(f"{repository} lacks the component {name}; it has {', '.join(k for k in index if k[0] != '_')}")
    library, class_name, *_ = [*index[name], None, None] if isinstance(index[name], list) else (index[name], None)
    found: Any = None
    if isinstance(class_name, str) and library in ("diffusers", "transformers"):  # a repository may come from anywhere
        found = getattr(importlib.import_module(library), class_name, None)
    if not hasattr(found, "from_pretrained"):
        raise UserError(f"{repository}: {name} names {library}.{class_name}, no model of diffusers or transformers")
    return found


def encoders_identity(
    repository: str, revision: str | None, names: Sequence[str], memo: Path, single_files: dict[str, Path]
) -> dict[str, str]:
    """Return what the outputs of these components depend on: a hub repository's commit, or checksums of local files.

    Args:
        memo: a file that remembers the checksums; a file is read again only if it has changed.
        single_files: the weights of components that are not the repository's.
    """
    hashes = FileHashes([memo] if memo.is_file() else [])
    own = sorted(path for name in names for path in Path(repository, name).rglob("*") if path.is_file())
    read = [path for path in own if path.parent.name not in single_files or path.name == "config.json"]
    paths = {path.relative_to(repository).as_posix(): path for path in read} | single_files
    checksums = {}
    for path in dict.fromkeys(paths.values()):
        known = hashes.get(path)
        if known is None:
            if path.stat().st_size > LARGE:
                log.info(f"reading {path} once, for its checksum")
            known = (hashed := hash_file(path))[4]
            with suppress(OSError):  # read-only: the file is read again next time
                memo.parent.mkdir(parents=True, exist_ok=True)
                with memo.open("a", encoding="utf-8") as file:
                    file.write(FileHashes.line(hashed))
        checksums[path] = known
    files = {name: checksums[path] for name, path in paths.items()}
    if not Path(repository).is_dir():
        index = index_file(repository, revision)
        assert index is not None
        files |= {"repository": repository, "commit": index.parent.name}
    return files


def stored_bytes(repository: str, revision: str | None, subfolder: str) -> tuple[int, int] | None:
    """Return the bytes of a component's weights, and of those to be downloaded; None if the hub does not answer."""
    if (folder := Path(resolve_repository(repository), subfolder)).is_dir():
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")), 0
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError):
        pattern = f"{subfolder}/*.safetensors".lstrip("/")
        files = snapshot_download(repository, revision=revision, allow_patterns=pattern, dry_run=True)
        return sum(one.file_size or 0 for one in files), sum(one.file_size or 0 for one in files if one.will_download)
    return None


def meta_component(repository: str, name: str, revision: str | None = None, parameters_only: bool = False) -> Any:
    """Return a component's model on the meta device, or its parameters only; None for a component without weights."""
    cls = component_class(repository, name, revision)
    if any(word in cls.__name__ for word in WITHOUT_WEIGHTS):
        return None
    return meta_model(cls, component_config(repository, name, revision), parameters_only).requires_grad_(False)


def meta_model(cls: Any, config: dict[str, Any], parameters_only: bool = False) -> Any:
    """Build a model on the meta device; with `parameters_only` its buffers have values."""
    from accelerate import init_empty_weights

    with init_empty_weights() if parameters_only else torch.device("meta"):
        return cls.from_config(config) if hasattr(cls, "from_config") else cls(cls.config_class.from_dict(config))
