"""Whether a component of a local repository has the files that it needs, whole: libraries fill gaps in silence."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import reading
from lightning_modules.pretrained.weights import GET_AGAIN, check_library_weights

# What a tokenizer is made from, one way or another. Without any, transformers makes one that knows no word.
VOCABULARIES = (("tokenizer.json",), ("spiece.model",), ("vocab.json", "merges.txt"))
PREPROCESSORS = (("preprocessor_config.json",), ("processor_config.json",))
# What libraries read weights from, or from the files in its index.
USUAL = {
    "diffusers": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
    "transformers": ("model.safetensors", "pytorch_model.bin"),
}
# Files that hold weights, whether they are read or not.
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|pkl|gguf|msgpack|h5|onnx|xml|tflite|index(\.\w+)?\.json)")


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
        check_weight_files(folder, class_name)
        check_library_weights(folder, read_json(folder / "config.json"))
    for path in folder.glob("*.json"):
        with reading(path, GET_AGAIN):
            json.loads(path.read_text(encoding="utf-8"))


def _require(folder: Path, choices: Iterable[tuple[str, ...]]) -> None:
    if not any(all((folder / name).is_file() for name in names) for names in choices):
        wanted = ", or ".join(" and ".join(names) for names in choices)
        raise UserError(f"{folder} lacks {wanted}: the download is incomplete; {GET_AGAIN}")


def check_weight_files(folder: Path, class_name: str) -> None:
    """Raise a UserError where the files that a model's weights are read from are not in a folder."""
    check_weight_names([path.name for path in folder.iterdir()], class_name, str(folder))
    # Of those that a download may have left, what is loaded is looked at.
    kind = "safetensors" if any(folder.glob("*.safetensors")) else "bin"
    for index in [path for path in folder.glob(f"*.{kind}.index.json") if path.name.count(".") == 3]:
        if missing := [name for name in indexed_files(index) if not (folder / name).is_file()]:
            raise UserError(f"{folder} lacks {listing(missing)}: the download is incomplete; {GET_AGAIN}")


def check_weight_names(names: Sequence[str], class_name: str, where: str) -> None:
    """Raise a UserError where none of the files is one that the library of a class reads; it names those there."""
    import diffusers

    library = "diffusers" if class_name in dir(diffusers) else "transformers"  # imports no class
    usual, *others = USUAL[library]
    if any(name in names for whole in (usual, *others) for name in (whole, f"{whole}.index.json")):
        return
    others = sorted(name for name in names if WEIGHTS.fullmatch(name))
    if not others:
        raise UserError(f"{where} lacks its weights: the download is incomplete; {GET_AGAIN}")
    variant = others[0].split(".")[::2] == usual.split(".")
    remedy = f"rename it to {usual}" if variant else f"save the model with {library} (save_pretrained)"
    raise UserError(f"{where} has {listing(others)} and not {usual}, which is read: {remedy}")
