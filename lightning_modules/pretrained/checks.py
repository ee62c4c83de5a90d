"""Checks of a model's files without reading weights: complete, undamaged, and in a format that is read.

Libraries fill gaps with random numbers or empty vocabularies, and ignore scales they do not know, without a word.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from foundation.catalogue import shipped_models
from foundation.errors import UserError, listing
from foundation.files import MODEL_JSON, read_bytes, reading
from foundation.hub import repository_file
from lightning_modules.lora_files.names import WRAPPERS
from lightning_modules.pretrained.weights import GET_AGAIN, SafetensorsWeights, Weights, rotated_group
from lightning_modules.quantization.eight_bit import ROTATED_GROUPS
from lightning_modules.quantization.quantization import PLAIN, QUANTIZATIONS

NOT_READ = "which is not read: use the model's 16-bit, fp8 or int8 weights, or a GGUF file of its transformer"
# ComfyUI's names of the formats that are read, by weight dtype; other entries that its notes may have.
COMFY = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8_tensorwise"}
HARMLESS = {"format", "full_precision_matrix_mult", "per_row", "per_channel", "params", "orig_dtype", "orig_shape"}
ROTATED = {"convrot", "convrot_groupsize", "weight_rotated"}
# Alternatives of files that a component needs. Without a vocabulary transformers creates an empty tokenizer.
VOCABULARIES = (("tokenizer.json",), ("spiece.model",), ("vocab.json", "merges.txt"))
PREPROCESSORS = (("preprocessor_config.json",), ("processor_config.json",))
# Suffixes of single files that people name instead of a repository.
SUFFIXES = (".safetensors", ".sft", ".gguf")
# Names of the libraries' weights; an index of several files has the name with .index.json.
USUAL = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}
# What tensors of some names say about a file.
SIGNS = {
    r"lora_(A|B|down|up)\b|hada_w1|lokr_w1|oft_blocks": (
        "is a LoRA: pass it by lora= (predict.py), adapter.init_from= or model.training_adapter="
    ),
    r"\._data$": "is quantized by quanto, {}",
    r"[:_]qdata$": "is quantized by torchao, {}",
    r"\.(wscales|smooth_factor|smooth_orig|qweight|W_q|weight_packed)$": (
        "is quantized by nunchaku (SVDQuant) or a similar program, {}"
    ),
    r"\.weight_scale_2$": "is quantized to nvfp4, {}",
}
# The settings of single files, which may all name one checkpoint.
NAMED = [f"model.{part}_name_or_path" for part in ("transformer", "text_encoder", "vae")]
NAME_FILES = f"single files, also a checkpoint of all parts, are named by {', '.join(NAMED)}"
# Files of weights, whether they are read or not.
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|pkl|gguf|msgpack|h5|onnx|xml|tflite|index(\.\w+)?\.json)")


def models_for(class_name: str | None) -> str:
    """Return the models of conf/ for a pipeline or transformer of diffusers, as settings to choose; "" if none is."""
    found = []
    for model, folder in shipped_models():
        configs = [*folder.glob("*model_index.json"), folder / "transformer/config.json"]
        if any(read_json(config)["_class_name"] == class_name for config in configs):
            found.append(model.name)
    return f"model={' or '.join(found)}" if found else ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a repository's file; raise a UserError for anything else."""
    with reading(path, GET_AGAIN):
        content = json.loads(read_bytes(path, MODEL_JSON))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    return content


def files_in(folder: str) -> str:
    """Return the advice to name the single files in a folder; "" if it has none."""
    names = sorted(path.name for path in Path(folder).glob("*.*") if path.suffix.lower() in SUFFIXES)
    return f". It contains {listing(names)}; {NAME_FILES}" if names else ""


def check_component(folder: Path, class_name: str) -> None:
    """Check a component's files without weights; raise a UserError for one that is missing, no JSON, or cut off."""
    is_processor = "Processor" in class_name or "FeatureExtractor" in class_name
    if "Scheduler" in class_name:
        _require(folder, (("scheduler_config.json",),))
    elif is_processor:
        _require(folder, PREPROCESSORS)
    if "Tokenizer" in class_name or ("Processor" in class_name and "ImageProcessor" not in class_name):
        _require(folder, VOCABULARIES)
    elif not is_processor and "Scheduler" not in class_name:
        _require(folder, (("config.json",),))
        refuse_method(read_json(folder / "config.json"), str(folder))
        open_weights(str(folder), None, library_of(class_name))
    for path in folder.glob("*.json"):
        with reading(path, GET_AGAIN):
            json.loads(read_bytes(path, MODEL_JSON))


def _require(folder: Path, choices: Iterable[tuple[str, ...]]) -> None:
    if not any(all((folder / name).is_file() for name in names) for names in choices):
        wanted = ", or ".join(" and ".join(names) for names in choices)
        raise UserError(f"{folder} lacks {wanted}: the download is incomplete; {GET_AGAIN}")


def library_of(class_name: str) -> str:
    """Return the library of a model's class, a key of `USUAL`."""
    import diffusers

    return "diffusers" if class_name in dir(diffusers) else "transformers"  # imports no class


def open_weights(
    repository: str, subfolder: str | None, library: str, revision: str | None = None
) -> SafetensorsWeights:
    """Open a model's safetensors files; raise a UserError if one is missing, damaged or of another kind."""
    start, usual = f"{subfolder}/" if subfolder else "", USUAL[library]
    index = repository_file(repository, f"{start}{usual}.index.json", revision)
    listed: dict[str, str] = {}
    if index is not None:
        with reading(index, GET_AGAIN):
            listed = {WRAPPERS.sub("", name): str(file) for name, file in read_json(index)["weight_map"].items()}
    # transformers would read the usual file, diffusers the files of the index: tensors may be there twice.
    names = {*listed.values()} | ({usual} if not listed or Path(repository, start, usual).is_file() else set())
    files = {name: repository_file(repository, start + name, revision) for name in sorted(names)}
    if missing := [name for name, file in files.items() if file is None]:
        folder, save = Path(repository, start), f"save the model as safetensors with {library} (save_pretrained)"
        others = sorted(path.name for path in folder.glob("*") if WEIGHTS.fullmatch(path.name))
        if index is None and others:
            shards = any(re.search(r"-\d+-of-\d+\.", name) for name in others)
            lacks = f"their index, {usual}.index.json: {GET_AGAIN}" if shards else f"{usual}: rename a variant"
            raise UserError(f"{folder} has {listing(others)} and not {lacks}, or {save}; {NAME_FILES}")
        lacks = f"lacks {listing(missing)}" if index else f"lacks its weights, {usual}"
        raise UserError(f"{folder} {lacks}: {GET_AGAIN}, or {save}")
    weights = SafetensorsWeights(file for file in files.values() if file is not None)
    places = {name: files[file] for name, file in listed.items()}
    if listed and (wrong := sorted(name for name, _ in places.items() ^ weights.files.items())):
        said, true = (facts.get(wrong[0], "no file") for facts in (places, weights.files))
        raise UserError(f"{index} says that {wrong[0]} is in {said}, and it is in {true}: {GET_AGAIN}")
    return weights


def check_names(weights: Weights, model: nn.Module, where: str) -> None:
    """Raise a UserError unless a model's tensors, which may be on the meta device, are all on disk, and no others."""
    dtypes, state = weights.dtypes, model.state_dict()
    buffers = {name: one for name, one in model.named_buffers() if name in state and one.is_floating_point()}
    own = dict(model.named_parameters()) | buffers  # tied ones once
    check_notes(weights, where)
    if missing := [name for name in own if name not in dtypes]:
        raise UserError(f"{where} lacks {listing(missing)}: is it complete, and made for {type(model).__name__}?")
    layers = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) and f"{name}.weight" in dtypes]
    known = {name for name in own if dtypes[name] in PLAIN}
    known = known.union(*(row.readable(dtypes, layers, where) for row in QUANTIZATIONS.values()))
    if strange := [name for name in own if name not in known]:
        raise UserError(
            f"{where} has {listing(strange)} in {dtypes[strange[0]]}, whose scales are not known, {NOT_READ}"
        )
    if unexpected := sorted(dtypes.keys() - known):
        raise UserError(f"{where} has {listing(unexpected)}, which its model lacks: they would be left out")
    for name, tensor in own.items():  # packed weights have other shapes
        stored, wanted = ("x".join(map(str, shape)) for shape in (weights.shapes[name], tensor.shape))
        if dtypes[name] != "U8" and stored != wanted:
            raise UserError(
                f"{where} has {name} of {stored}, {type(model).__name__} of {wanted}: it is of another model"
            )


def check_notes(weights: Weights, where: str) -> None:
    """Raise a UserError for a file that is quantized in a way that is not read, by ComfyUI's notes or its names."""
    for layer, note in weights.notes.items():
        name, format, group = f"{layer}.weight", note.get("format"), rotated_group(note)
        dtype = weights.dtypes.get(name, "")
        known = HARMLESS | ROTATED if dtype == "I8" else HARMLESS
        unknown = any(note[key] for key in note.keys() - known) or not note.get("weight_rotated", True)
        if format != COMFY.get(dtype) or unknown:
            raise UserError(f"{where} has {layer} quantized by {format or note}, {NOT_READ}")
        if group != 1 and (group not in ROTATED_GROUPS or weights.shapes[name][1] % group):
            raise UserError(f"{where} has {layer} rotated in groups of {group}, {NOT_READ}")
    for sign, what in SIGNS.items():
        if any(re.search(sign, name) for name in weights.dtypes):
            raise UserError(f"{where} {what.format(NOT_READ)}")


def refuse_method(config: Mapping[str, Any], where: str) -> None:
    """Raise a UserError if a model's config.json names a quantization that is not read."""
    method = (config.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if not re.fullmatch("bitsandbytes|retouch_.*|(fp|float)8.*", method):
        raise UserError(f"{where} is quantized by {method}, {NOT_READ}")
