"""LoRA files of any program: found, inspected without reading weights, and read as deltas of a model's layers."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import regex
import safetensors
import torch
from torch import Tensor

from foundation.errors import UserError, listing, printable
from foundation.files import TEXT, kind_of_file, read_bytes, reading, with_short_header
from foundation.hub import repository_file
from lightning_modules.lora_files.delta import Delta, LowRank
from lightning_modules.lora_files.kinds import make_delta, matching_kinds
from lightning_modules.lora_files.names import OTHER_ADAPTERS, LayerNames, Meaning, ignored, split_key

log = logging.getLogger("retouch")

# Key of Retouch's own facts in a file's header; diffusers reads other keys and ignores this one.
HEADER_KEY = "retouch"
# Key under which diffusers' own trainers store peft's settings.
DIFFUSERS_KEY = "lora_adapter_metadata"
NAME_ANOTHER = "name a LoRA's safetensors file, or download it again"
CORRECT = "Correct the wrong one, or download both again"
# Letters; layer names have about a hundred.
LONGEST_NAME = 500
# Settings of the scale, of training only, or of which layers are adapted.
UNDERSTOOD = frozenset(
    (  # noqa: SIM905 (a list would have a line for each)
        "alpha alpha_pattern auto_mapping base_model_name_or_path decompose_both decompose_factor "
        "ensure_weight_tying eps eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
        "lora_alpha lora_dropout module_dropout megatron_core modules_to_save peft_version "
        "qalora_group_size r rank_dropout rank_dropout_scale rank_pattern revision runtime_config "
        "target_modules task_type use_dora use_effective_conv2d use_rslora "
    ).split()
)
# Values of other settings that leave a delta as it is: peft's defaults, and initializations that keep the base as it
# is. PiSSA, OLoRA, CorDA and LoftQ change the base, and such a LoRA is only the difference from the changed base.
STARTS = (True, None, False, "gaussian", "orthogonal", "eva")
AS_USUAL = {
    "peft_type": ("LORA", "LOKR", "LOHA"),
    "bias": ("none",),
    "init_lora_weights": STARTS,
    "init_weights": STARTS,
}
LONGEST_MATCH = 0.1  # seconds
_compiled = lru_cache(4096)(regex.compile)
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
# The name of one of peft's adapters.
NAMED_ADAPTER = re.compile(r"\.lora_[AB]\.([^.]+)\.weight$")
# owner/name, or owner/name/FILE.
ON_THE_HUB = re.compile(r"([\w.-]+/[\w.-]+?)(?:/(.+\.safetensors))?", re.ASCII)


def find_weights(lora: str | Path) -> Path:
    """Return the weights file of a run's folder or a weights folder, or the file itself."""
    path = Path(lora).expanduser()
    candidates = [path, path / WEIGHTS_NAME, path / "lora" / "last" / WEIGHTS_NAME, path / PEFT_WEIGHTS_NAME]
    if found := next((candidate for candidate in candidates if candidate.is_file()), None):
        return found
    if not path.exists():
        near = get_close_matches(path.name, [one.name for one in path.parent.glob("*")], 1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise UserError(f"LoRA weights {path}: no such file or folder{hint}")
    if (path / "model" / "last").is_dir():
        raise UserError(
            f"LoRA weights {path}: this run trained all weights. Replace lora= by model=NAME "
            f"model.pretrained_model_name_or_path={path / 'model' / 'last'}"
        )
    others = sorted(one for one in path.glob("*") if one.suffix.lower() in (".safetensors", ".sft"))
    if len(others) == 1:
        return others[0]
    there = f", but {listing([one.name for one in others])}. Choose one, as in {others[0]}" if others else ""
    raise UserError(f"LoRA weights {path}: it contains neither {WEIGHTS_NAME} nor lora/last/{WEIGHTS_NAME}{there}")


def find_or_download(lora: str | Path) -> Path:
    """Return a local weights file as `find_weights`, else one of the hub: `owner/name` or `owner/name/FILE`."""
    match = ON_THE_HUB.fullmatch(str(lora))
    # outputs/ and other folders here are not owners on the hub.
    if match is None or Path(lora).expanduser().exists() or Path(lora).parent.is_dir():
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
    if path.name == PEFT_WEIGHTS_NAME:  # their scale is in another file
        repository_file(repository, filename.replace(PEFT_WEIGHTS_NAME, PEFT_CONFIG_NAME))
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
        shapes: the shape of each tensor.
        dtypes: safetensors' name of each tensor's dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(self.path, NAME_ANOTHER):
            if kind := kind_of_file(path):
                raise UserError(f"{path} is {kind}; {NAME_ANOTHER}")
            with safetensors.safe_open(with_short_header(path), framework="pt") as opened:
                self.metadata: dict[str, str] = opened.metadata() or {}
                shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
                # A kernel of one pixel is a matrix.
                self.shapes = {key: shape[:2] if {*shape[2:]} == {1} else shape for key, shape in shapes.items()}
                self.dtypes = {key: str(opened.get_slice(key).get_dtype()) for key in self.shapes}
            if not all(key.isprintable() and len(key) <= LONGEST_NAME for key in self.shapes):
                raise ValueError("it has names that no layer has")

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that reads a tensor by its name."""
        with reading(self.path, NAME_ANOTHER), safetensors.safe_open(self.path, framework="pt") as file:
            yield file.get_tensor

    @cached_property
    def header(self) -> dict[str, Any]:
        """The facts about the run that Retouch wrote into the file; empty for other programs' files."""
        with reading(self.path, NAME_ANOTHER):
            header = _json_object(self.metadata.get(HEADER_KEY, "{}"))
            parts = [header.get(name) for name in ("adapter", "model", "export")]
            parts += [(parts[0] or {}).get("rank_schedule"), (parts[1] or {}).get("quantization")]
            if not all(part is None or isinstance(part, dict) for part in parts):
                raise ValueError(f"its header {HEADER_KEY} is not one of ours")
        return header

    @property
    def adapter(self) -> dict[str, Any]:
        """The header's facts about the adapter; empty for other programs' files."""
        return self.header.get("adapter") or {}

    @cached_property
    def ignored(self) -> dict[str, list[str]]:
        """Names of the tensors that Retouch ignores, by what they belong to."""
        owners = {key: ignored(key) for key in self.shapes}
        return {owner: [key for key in owners if owners[key] == owner] for owner in owners.values() if owner}

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """Names of each layer's tensors (its delta's and alpha), by the file's name of the layer."""
        layers: dict[str, dict[str, str]] = {}
        others, adapters = [], {one[1]: key for key in self.shapes if (one := NAMED_ADAPTER.search(key))}
        if len(adapters) > 1:
            raise self._error(f"contains several adapters ({_some_keys([*adapters.values()])}). Name one")
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
        of = next((f" of {kind}" for word, kind in OTHER_ADAPTERS.items() if any(word in key for key in others)), "")
        if others and not layers and not of:
            raise UserError(
                f"{self.path} is not a LoRA: it has {_some_keys(sorted(others))}. A model's own weights are set by "
                "model.transformer_name_or_path"
            )
        if others:
            raise self._error(
                f"contains tensors{of} that Retouch does not read ({_some_keys(sorted(others))}); it reads LoRA, DoRA, "
                "LoKr and LoHa of linear layers"
            )
        if not layers:
            only = f", only weights of {' and '.join(self.ignored)}" if self.ignored else ""
            raise self._error(f"contains no layer of a transformer{only}")
        return dict(sorted(layers.items()))

    @cached_property
    def empty(self) -> dict[str, Delta]:
        """Each layer's delta on the meta device, by the file's name of the layer."""
        with reading(self.path, NAME_ANOTHER):
            settings = [item for one in self._peft_settings.values() for item in one.items()]
        for name, value in sorted(settings, key=lambda item: item[0] != "peft_type"):
            if name not in UNDERSTOOD and value not in AS_USUAL.get(name, (None, False, "", [], {})):
                raise self._error(
                    f"was saved by peft with {name}={shown(value, 60)}, which Retouch does not read. Save it "
                    "as a plain LoRA there"
                )
        found = {}
        for name, parts in self.parts.items():
            tensors = {part: torch.empty(self.shapes[key], device="meta") for part, key in parts.items()}
            try:
                found[name] = make_delta(tensors)
            except ValueError as error:
                raise self._error(f"contains a layer that Retouch does not read: {shown(name)} has {error}") from error
        return found

    def match(self, names: LayerNames, base: str) -> dict[str, Meaning]:
        """Return the layers that the file's names stand for; raises UserError if the model `base` lacks some."""
        found: dict[str, Meaning] = {}
        unknown, wide = [], []
        for name, delta in self.empty.items():
            meaning = names.meaning(name)
            if meaning is None:
                unknown.append(f"{shown(name)} is not in the model")
                continue
            shapes = [names.shapes[layer] for layer in meaning.layers]
            wanted = sum(one.out_features for one in shapes), shapes[0].in_features
            out, width = delta.shape
            if wanted != (out or wanted[0], width):
                wide.append(f"{shown(name)} is {out or 'any'}x{width}, in the model {wanted[0]}x{wanted[1]}")
            found[name] = meaning
        if wrong := unknown + wide:
            trained_on = self.header.get("base")
            hint = f"; it was trained on {shown(trained_on)}" if trained_on else ""
            raise self._error(f"does not fit {base}: {listing(wrong)}{hint}")
        return found

    def read(self, names: LayerNames, base: str) -> dict[str, Delta]:
        """Read the deltas of a model's layers, by diffusers' names, in float32; raises UserError as `match`."""
        deltas: dict[str, Delta] = {}
        meanings, unstated = self.match(names, base), []
        for owner, keys in self.ignored.items():
            log.warning(f"note: {self.path} also contains {owner}: {len(keys)} tensors are ignored")
        with self.opened() as read_tensor:
            for name, parts in self.parts.items():
                tensors = {part: read_tensor(key).float().reshape(self.shapes[key]) for part, key in parts.items()}
                if bad := [parts[part] for part, tensor in tensors.items() if not tensor.isfinite().all()]:
                    raise self._error(f"contains values that are not finite ({shown(bad[0])}): training diverged")
                whole = self.empty[name].like(tensors)
                scale = self._scale(names, name, whole, tensors.get("alpha"))
                unstated += [name] if scale is None else []
                whole = whole if scale in (None, 1) else whole.scaled(scale)
                for layer, delta in _split(whole, meanings[name], names).items():
                    if layer in deltas:
                        raise self._error(f"contains {layer} twice, once as {shown(name)}. Remove one of them")
                    deltas[layer] = delta
        by_peft = self.path.name == PEFT_WEIGHTS_NAME or any(name.startswith("base_model.") for name in unstated)
        if unstated and not self.header and (by_peft or len(unstated) < len(self.parts)):
            lacks = f"neither an alpha nor an {PEFT_CONFIG_NAME} next to {PEFT_WEIGHTS_NAME}. A scale of 1 is assumed"
            log.warning(f"note: {self.path} states no scale for {_some_keys(unstated)}: {lacks}")
        return {layer: deltas[layer] for layer in names.shapes if layer in deltas}

    def scales(self, names: LayerNames) -> dict[str, float]:
        """Return alpha / rank of each layer as used by `read`, by the file's names of the layers."""
        with self.opened() as read_tensor:
            alphas = {name: read_tensor(parts["alpha"]) for name, parts in self.parts.items() if "alpha" in parts}
            found = {name: self._scale(names, name, delta, alphas.get(name)) for name, delta in self.empty.items()}
        return {name: 1.0 if scale is None else scale for name, scale in found.items()}

    def _scale(self, names: LayerNames, name: str, delta: Delta, alpha: Tensor | None) -> float | None:
        """Return alpha / rank by the tensor or peft's settings, None without; raise a UserError if they contradict."""
        meaning = names.meaning(name)
        layers = (name, *(() if meaning is None else meaning.layers))
        scales = {} if alpha is None else {"its alpha": float(alpha) / delta.divisor if delta.divisor else 1.0}
        for source, settings in self._peft_settings.items():
            place = self.path.with_name(source) if source == PEFT_CONFIG_NAME else self.path
            with reading(place, "correct it, or download it again"):
                said, scale = _contradicted(settings, layers, delta), _peft_scale(settings, layers, delta)
            if said:
                has = f"is a {delta.kind} and has rank {delta.size}"
                raise self._error(f"contradicts itself: {source} says {said}, {shown(name)} {has}. {CORRECT}")
            if scale is not None:
                scales[source] = scale
        if not all(map(math.isfinite, scales.values())):
            raise ValueError(f"the alpha of {shown(name)} is not finite")
        if scales and not math.isclose(min(scales.values()), max(scales.values()), rel_tol=0.01):  # bfloat16's rounding
            said = " and ".join(f"{scale:g} by {source}" for source, scale in scales.items())
            raise self._error(f"contradicts itself: the scale of {shown(name)} is {said}. {CORRECT}")
        return next(iter(scales.values()), None if delta.divisor else 1.0)

    @cached_property
    def _peft_settings(self) -> dict[str, dict[str, Any]]:
        """peft's settings of the transformer's adapter by their place: diffusers' header, peft's own file."""
        found = {}
        if DIFFUSERS_KEY in self.metadata:
            own = _json_object(self.metadata[DIFFUSERS_KEY]).items()
            found["its header"] = {k.removeprefix("transformer."): v for k, v in own if not k.startswith("text_enc")}
        config = self.path.with_name(PEFT_CONFIG_NAME)
        if self.path.name == PEFT_WEIGHTS_NAME and config.is_file():
            with reading(config, "download it again"):
                found[PEFT_CONFIG_NAME] = _json_object(read_bytes(config, TEXT).decode())
        return found

    def _error(self, text: str) -> UserError:
        return UserError(f"the LoRA {self.path} {text}")


def _split(whole: Delta, meaning: Meaning, names: LayerNames) -> dict[str, Delta]:
    """Split a delta into one per layer that its name stands for, except for unchanged layers."""
    if len(meaning.layers) == 1 and not meaning.swapped:
        return {meaning.layers[0]: whole}
    widths = [names.shapes[layer].out_features for layer in meaning.layers]
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


def _peft_scale(settings: Mapping[str, Any], layers: tuple[str, ...], delta: Delta) -> float | None:
    """Return alpha / rank of a layer, alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732), or None without an alpha."""
    own = settings.get("peft_type") in ("LOKR", "LOHA")  # the settings' rank counts even if the factors are whole
    alpha = _setting(settings, "alpha" if own else "lora_alpha", layers)
    rank = _setting(settings, "r", layers, delta.divisor) if own or delta.divisor else None
    divisor = math.sqrt(rank) if rank and settings.get("use_rslora") else rank
    return None if alpha is None or divisor is None else alpha / divisor


def _contradicted(settings: Mapping[str, Any], layers: tuple[str, ...], delta: Delta) -> str | None:
    """Return the first setting that the tensors of a layer with these names contradict; None if all agree."""
    low_rank, is_dora, rank = isinstance(delta, LowRank), delta.kind == "DoRA", delta.divisor or 0
    kind, dora = "LORA" if low_rank else delta.kind.upper(), bool(settings.get("use_dora", is_dora))
    stated = _setting(settings, "r", layers) or rank
    most = stated * max(len(layers) - 1, 1) if low_rank else stated  # a joined layer may hold the components of each
    targets = settings.get("target_modules") or "all-linear"
    pattern = targets if isinstance(targets, str) else "|".join(map(regex.escape, targets))
    wrong = {
        f"peft_type={settings.get('peft_type')}": (settings.get("peft_type") or kind) != kind,
        f"use_dora={str(dora).lower()}": low_rank and dora != is_dora,
        f"r={stated:g}": rank and (rank % stated or rank > most),
        "target_modules without it": targets != "all-linear" and not _matches(pattern, layers, "target_modules"),
    }
    return next((setting for setting, is_wrong in wrong.items() if is_wrong), None)


def _setting(settings: Mapping[str, Any], name: str, layers: tuple[str, ...], default: Any = None) -> float | None:
    """Return a setting of a layer with these names: its pattern's value, else the common value, else the default."""
    kind = "rank_pattern" if name == "r" else "alpha_pattern"
    own = (value for key, value in (settings.get(kind) or {}).items() if _matches(key, layers, kind))
    value = next(own, settings.get(name))
    value = default if value is None else value
    return None if value is None else float(value)


def _matches(pattern: str, layers: tuple[str, ...], kind: str) -> bool:
    """Return whether a pattern of peft matches one of a layer's names; `kind` is its setting."""
    try:
        return any(_compiled(rf"(.*\.)?({pattern})$").match(layer, timeout=LONGEST_MATCH) for layer in layers)
    except (regex.error, TimeoutError) as error:
        raise ValueError(f"{kind}: {error}") from error


def shown(value: Any, most: int = 100) -> str:
    """Return a text from a file, of any length and content, as part of one line, without its middle if it is long."""
    text = str(value)
    return printable(text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}")


def _some_keys(names: Sequence[str]) -> str:
    return listing(list(map(shown, names)))
