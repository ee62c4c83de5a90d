"""LoRA files of any program: found, inspected without reading weights, and read as deltas of a model's layers."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import regex
import safetensors
import torch
from torch import Tensor

from datamodules.errors import UserError, listing, printable
from datamodules.files import kind_of_file, reading
from datamodules.hub import repository_file
from lightning_modules.lora_files.delta import Delta
from lightning_modules.lora_files.kinds import make_delta, matching_kinds
from lightning_modules.lora_files.names import LayerNames, Meaning, ignored, split_key

log = logging.getLogger("retouch")

# Key of Retouch's own facts in a file's header; diffusers reads other keys and ignores this one.
HEADER_KEY = "retouch"
# Key under which diffusers' own trainers store peft's settings.
DIFFUSERS_KEY = "lora_adapter_metadata"
REMEDY = "name a LoRA's safetensors file, or download it again"
# Bytes; a LoRA of thousands of layers has a header of about one million.
LARGEST_HEADER = 10 * 10**6
# Letters; layer names have about a hundred.
LONGEST_NAME = 500
# Settings of the scale, of training only, or of which layers are adapted.
UNDERSTOOD = frozenset(
    (  # noqa: SIM905 (a list would have a line for each)
        "alpha alpha_pattern auto_mapping base_model_name_or_path decompose_both decompose_factor "
        "ensure_weight_tying eps eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
        "lora_alpha lora_dropout module_dropout megatron_core modules_to_save oft_block_size peft_version "
        "qalora_group_size r rank_dropout rank_dropout_scale rank_pattern revision runtime_config "
        "target_modules task_type use_dora use_effective_conv2d use_rslora "
    ).split()
)
# Values of other settings that leave a delta as it is: peft's defaults, and initializations that keep the base as it
# is. PiSSA, OLoRA, CorDA and LoftQ change the base, and such a LoRA is only the difference from the changed base.
STARTS = (True, None, False, "gaussian", "orthogonal", "eva")
AS_USUAL = {
    "peft_type": ("LORA", "LOKR", "LOHA", "OFT"),
    "bias": ("none",),
    "init_lora_weights": STARTS,
    "init_weights": STARTS,
    "use_cayley_neumann": (True,),
    "num_cayley_neumann_terms": (5,),
}
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"

# owner/name, or owner/name/FILE.
SECONDS_OF_A_MATCH = 0.1
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


class LoRAFile:
    """A LoRA's safetensors file; opening reads only the header.

    Attributes:
        metadata: the header's entries other than tensors.
        shapes: of its tensors.
        dtypes: of its tensors, by safetensors' names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(self.path, REMEDY):
            if kind := kind_of_file(path):
                raise UserError(f"{path} is {kind}; {REMEDY}")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if LARGEST_HEADER < length <= path.stat().st_size:
                raise ValueError(f"its header has {length:,} bytes")
            with safetensors.safe_open(path, framework="pt") as opened:
                self.metadata: dict[str, str] = opened.metadata() or {}
                self.shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
                self.dtypes = {key: str(opened.get_slice(key).get_dtype()) for key in self.shapes}
            if not all(key.isprintable() and len(key) <= LONGEST_NAME for key in self.shapes):
                raise ValueError("it has names that no layer has")

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that reads a tensor by its name."""
        with reading(self.path, REMEDY), safetensors.safe_open(self.path, framework="pt") as file:
            yield file.get_tensor

    @cached_property
    def header(self) -> dict[str, Any] | None:
        """The facts about the run that Retouch wrote into the file; None for other programs' files."""
        if HEADER_KEY not in self.metadata:
            return None
        with reading(self.path, REMEDY):
            header = _json_object(self.metadata[HEADER_KEY])
            parts = [header.get(name) for name in ("adapter", "model", "export")]
            parts += [(parts[0] or {}).get("rank_schedule"), (parts[1] or {}).get("quantization")]
            if not all(part is None or isinstance(part, dict) for part in parts):
                raise ValueError(f"its header {HEADER_KEY} is not one of ours")
        return header or None

    @property
    def adapter(self) -> dict[str, Any]:
        """The header's facts about the adapter; empty for other programs' files."""
        return (self.header or {}).get("adapter") or {}

    @cached_property
    def ignored(self) -> dict[str, list[str]]:
        """Names of the tensors that Retouch ignores, by what they belong to."""
        owners = {key: ignored(key) for key in self.shapes}
        return {owner: [key for key in owners if owners[key] == owner] for owner in owners.values() if owner}

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """Names of each layer's tensors (alpha and those of the delta), by the file's name of the layer."""
        layers: dict[str, dict[str, str]] = {}
        others = []
        for key in self.shapes:
            name, part = split_key(key)
            if ignored(key):
                continue
            if part is None:
                others.append(key)
            elif part in layers.setdefault(name, {}):
                raise self._error(f"contains several adapters ({_some_keys([layers[name][part], key])}). Name one")
            else:
                layers[name][part] = key
        others += [key for parts in layers.values() if not matching_kinds(parts) for key in parts.values()]
        if others and not layers:
            raise UserError(
                f"{self.path} is not a LoRA: it has {_some_keys(sorted(others))}. A model's own weights are set by "
                "model.transformer_name_or_path"
            )
        if others:
            raise self._error(
                f"contains tensors that Retouch does not read ({_some_keys(sorted(others))}); it reads lora_A and "
                "lora_B or lora_down and lora_up of linear layers, with alpha and DoRA's magnitude, LoKr, LoHa and "
                "peft's OFT"
            )
        if not layers:
            only = f", only weights of {' and '.join(self.ignored)}" if self.ignored else ""
            raise self._error(f"contains no layer of a transformer{only}")
        return dict(sorted(layers.items()))

    @cached_property
    def empty(self) -> dict[str, Delta]:
        """Each layer's delta on the meta device, by the file's name of the layer."""
        with reading(self.path, REMEDY):
            settings = self._peft_settings
        for name, value in settings.items():
            if name not in UNDERSTOOD and value not in AS_USUAL.get(name, (None, False, "", [], {})):
                raise self._error(
                    f"was saved by peft with {name}={printable(str(value)[:60])}, which Retouch does not read. Save it "
                    "as a plain LoRA there"
                )
        found = {}
        for name, parts in self.parts.items():
            tensors = {part: torch.empty(self.shapes[key], device="meta") for part, key in parts.items()}
            try:
                found[name] = make_delta(tensors)
            except ValueError as error:
                raise self._error(
                    f"contains a layer that Retouch does not read: {short_key(name)} has {error}"
                ) from error
        return found

    def match(self, names: LayerNames, base: str) -> dict[str, Meaning]:
        """Return the layers that the file's names stand for; raises UserError if the model `base` lacks some."""
        found: dict[str, Meaning] = {}
        unknown, wide = [], []
        for name, delta in self.empty.items():
            meaning = names.meaning(name)
            if meaning is None:
                unknown.append(f"{short_key(name)} is not in the model")
                continue
            shapes = names.shapes_of(meaning.layers)
            wanted = sum(one.out_features for one in shapes), shapes[0].in_features
            out, width = delta.shape
            if wanted != (out or wanted[0], width):
                wide.append(f"{short_key(name)} is {out or 'any'}x{width}, in the model {wanted[0]}x{wanted[1]}")
            found[name] = meaning
        if wrong := unknown + wide:
            trained_on = (self.header or {}).get("base")
            hint = f"; it was trained on {printable(str(trained_on)[:150])}" if trained_on else ""
            raise self._error(f"does not fit {base}: {listing(wrong)}{hint}")
        return found

    def read(self, names: LayerNames, base: str) -> dict[str, Delta]:
        """Read the deltas of a model's layers, by diffusers' names, in float32; raises UserError as `match`."""
        deltas: dict[str, Delta] = {}
        meanings = self.match(names, base)
        for owner, keys in self.ignored.items():
            log.warning(f"note: {self.path} also contains {owner}: {len(keys)} tensors are ignored")
        with self.opened() as read_tensor:
            for name, parts in self.parts.items():
                tensors = {part: read_tensor(key).float() for part, key in parts.items()}
                if bad := [parts[part] for part, tensor in tensors.items() if not tensor.isfinite().all()]:
                    raise self._error(f"contains values that are not finite ({short_key(bad[0])}): training diverged")
                whole = self.empty[name].like(tensors)
                scale = self._scale(names, name, whole, tensors.get("alpha"))
                if not math.isfinite(scale):
                    raise ValueError(f"the alpha of {short_key(name)} is not finite")
                whole = whole if scale == 1 else whole.scaled(scale)
                for layer, delta in _split(whole, meanings[name], names).items():
                    if layer in deltas:
                        raise self._error(f"contains {layer} twice, once as {short_key(name)}. Remove one of them")
                    deltas[layer] = delta
        return {layer: deltas[layer] for layer in names.shapes if layer in deltas}

    def scales(self, names: LayerNames) -> dict[str, float]:
        """Return alpha / rank of each layer as used by `read`, by the file's names of the layers."""
        with self.opened() as read_tensor:
            alphas = {name: read_tensor(parts["alpha"]) for name, parts in self.parts.items() if "alpha" in parts}
            return {name: self._scale(names, name, delta, alphas.get(name)) for name, delta in self.empty.items()}

    def _scale(self, names: LayerNames, name: str, delta: Delta, alpha: Tensor | None) -> float:
        """Return alpha / rank, by the tensor or by peft's settings; 1 if neither exists."""
        if alpha is not None:
            return 1.0 if delta.divisor is None else float(alpha) / delta.divisor
        meaning = names.meaning(name)
        return _peft_scale(self._peft_settings, name if meaning is None else meaning.layers[0], delta)

    @cached_property
    def _peft_settings(self) -> Mapping[str, Any]:
        """peft's settings of the transformer's adapter, of diffusers' header or of the file next to peft's weights."""
        if DIFFUSERS_KEY in self.metadata:
            found = _json_object(self.metadata[DIFFUSERS_KEY]).items()
            return {key.removeprefix("transformer."): one for key, one in found if not key.startswith("text_enc")}
        config = self.path.with_name(PEFT_CONFIG_NAME)
        if self.path.name != PEFT_WEIGHTS_NAME or not config.is_file():
            return {}
        with reading(config, "download it again"):
            return _json_object(config.read_text(encoding="utf-8"))

    def _error(self, text: str) -> UserError:
        return UserError(f"the LoRA {self.path} {text}")


def _split(whole: Delta, meaning: Meaning, names: LayerNames) -> dict[str, Delta]:
    """Split a delta into those of the layers that its name stands for; an unchanged layer has none."""
    if len(meaning.layers) == 1 and not meaning.swapped:
        return {meaning.layers[0]: whole}
    widths = [one.out_features for one in names.shapes_of(meaning.layers)]
    try:
        parts = whole.split(widths, meaning.swapped)
    except ValueError as error:
        raise UserError(f"{listing(list(meaning.layers))}: the file contains {error}") from error
    return {layer: part for layer, part in zip(meaning.layers, parts, strict=True) if part is not None}


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises ValueError for anything else."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("its header is not an object")
    return value


def _peft_scale(settings: Mapping[str, Any], layer: str, delta: Delta) -> float:
    """Return alpha / rank of a layer, alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732), or 1 without settings."""
    if settings.get("peft_type") in ("LOKR", "LOHA"):  # the settings' rank counts even if the factors are whole
        rank = _layer_setting(settings, "r", layer)
        if rank <= 0:
            raise ValueError(f"r={rank:g} is not a rank")
        return _layer_setting(settings, "alpha", layer) / rank
    if "lora_alpha" not in settings or delta.divisor is None:
        return 1.0
    rank = delta.divisor
    return _layer_setting(settings, "lora_alpha", layer) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _layer_setting(settings: Mapping[str, Any], name: str, layer: str) -> float:
    """Return a setting of one layer: its pattern's value, else the common value."""
    kind = "rank_pattern" if name == "r" else "alpha_pattern"
    pattern = settings.get(kind) or {}
    try:
        # As peft does; a file's expression may take for ever.
        own = (pattern[key] for key in pattern if regex.match(rf"(.*\.)?({key})$", layer, timeout=SECONDS_OF_A_MATCH))
        return float(next(own, settings[name]))
    except (regex.error, TimeoutError) as error:
        raise ValueError(f"{kind}: {error}") from error


def short_key(name: str) -> str:
    """Return a file's name of something, of any length and content, as part of a line."""
    return printable(name if len(name) <= 100 else f"{name[:100]}...")


def _some_keys(names: Sequence[str]) -> str:
    return listing(list(map(short_key, names)))
