"""Whether a component of a local repository has the files that it needs, whole: libraries fill gaps in silence."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from datamodules.errors import UserError, listing
from datamodules.files import reading

GET_AGAIN = "download it again"
# What a tokenizer is made from, one way or another. Without any, transformers makes one that knows no word.
VOCABULARIES = (("tokenizer.json",), ("spiece.model",), ("vocab.json", "merges.txt"))
PREPROCESSORS = (("preprocessor_config.json",), ("processor_config.json",))
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """A file of a repository that holds an object.

    Raises:
        UserError: it holds something else.
    """
    with reading(path, GET_AGAIN):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    return content


def indexed_files(index: Path) -> list[str]:
    """The names of the weights files that an index lists; raises UserError where it is damaged."""
    with reading(index, GET_AGAIN):
        return sorted(set(read_json(index)["weight_map"].values()))


def check_component(folder: Path, class_name: str) -> None:
    """Look at the files of a component without reading its weights.

    Args:
        class_name: as model_index.json has it.

    Raises:
        UserError: a file is missing, is no JSON, or ends too early.
    """
    if "Scheduler" in class_name:
        _require(folder, (("scheduler_config.json",),))
    elif "Tokenizer" in class_name:
        _require(folder, VOCABULARIES)
    elif "Processor" in class_name or "FeatureExtractor" in class_name:
        _require(folder, PREPROCESSORS)
        if "Processor" in class_name and "ImageProcessor" not in class_name:  # which has a tokenizer
            _require(folder, VOCABULARIES)
    else:
        _require(folder, (("config.json",),))
        _check_weights(folder)
    for path in folder.glob("*.json"):
        with reading(path, GET_AGAIN):
            json.loads(path.read_text(encoding="utf-8"))


def _require(folder: Path, choices: Iterable[tuple[str, ...]]) -> None:
    if not any(all((folder / name).is_file() for name in names) for names in choices):
        wanted = ", or ".join(" and ".join(names) for names in choices)
        raise UserError(f"{folder} lacks {wanted}: the download is incomplete; {GET_AGAIN}")


def _check_weights(folder: Path) -> None:
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise UserError(f"{folder} lacks its weights: the download is incomplete; {GET_AGAIN}")
    # Of those that a download may have left, what is loaded is looked at.
    kind = "safetensors" if any(folder.glob("*.safetensors")) else "bin"
    for index in [path for path in folder.glob(f"*.{kind}.index.json") if path.name.count(".") == 3]:
        if missing := [name for name in indexed_files(index) if not (folder / name).is_file()]:
            raise UserError(f"{folder} lacks {listing(missing)}: the download is incomplete; {GET_AGAIN}")
    for path in folder.glob("*.safetensors"):
        with reading(path, GET_AGAIN), safe_open(path, "pt"):
            pass  # its header says where the file must end
