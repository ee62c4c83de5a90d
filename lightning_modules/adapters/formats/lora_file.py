"""LoRA files of any program: found, looked through without reading weights, and read as updates of a model's layers."""

import json
import logging
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from datamodules.errors import UserError, listing, printable
from datamodules.files import reading
from lightning_modules.adapters.formats.conversion import split
from lightning_modules.adapters.formats.keys import divide, is_text_encoders, other_kind, short_key, some_keys
from lightning_modules.adapters.formats.names import LayerNames, Meaning
from lightning_modules.adapters.formats.peft_settings import scale_of, settings_beside
from lightning_modules.adapters.kinds import kinds_of, made_of
from lightning_modules.adapters.ranks import Ranks
from lightning_modules.adapters.update import Update

log = logging.getLogger("retouch")

# Where Retouch's own facts stand in a file's header. diffusers reads other keys and leaves this one alone.
HEADER_KEY = "retouch"
# Where diffusers' own trainers keep the settings of peft.
DIFFUSERS_KEY = "lora_adapter_metadata"
# A LoRA of thousands of layers has a header of about one.
LARGEST_HEADER = 10 * 10**6
# Letters; those of layers have about a hundred.
LONGEST_NAME = 500


class LoRAFile:
    """A LoRA's safetensors file; opening it reads its header alone.

    Attributes:
        path: of the file.
        metadata: what its header says beside the tensors.
        shapes: of its tensors.

    Raises:
        UserError: it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "name a LoRA's safetensors file, or download it again"):
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

    @cached_property
    def header(self) -> dict[str, Any] | None:
        """What Retouch wrote of the run into the file; None in a file from elsewhere.

        Raises:
            UserError: it is none of ours.
        """
        if HEADER_KEY not in self.metadata:
            return None
        with reading(self.path, "name a LoRA's safetensors file, or download it again"):
            header = self._json(HEADER_KEY)
            parts = [header.get(name) for name in ("adapter", "model", "export")]
            parts += [(parts[0] or {}).get("rank_schedule"), (parts[1] or {}).get("quantization")]
            if not all(part is None or isinstance(part, dict) for part in parts):
                raise ValueError(f"its header {HEADER_KEY} is none of ours")
        return header or None

    @property
    def adapter(self) -> dict[str, Any]:
        """What the header says of the adapter; nothing in a file from elsewhere."""
        return (self.header or {}).get("adapter") or {}

    @cached_property
    def trained(self) -> Ranks | None:
        """The ranks and scales of its training; the weights have these in them. None in a file from elsewhere."""
        with reading(self.path, "name a LoRA's safetensors file, or download it again"):
            return Ranks.of_header(self.adapter)

    @property
    def trained_scale(self) -> float | None:
        """alpha / rank of its training; None where that is not known, or not the same for all layers."""
        return None if self.trained is None else self.trained.scale

    @cached_property
    def text_encoder_keys(self) -> list[str]:
        """The tensors of text encoders, which Retouch leaves out."""
        return [key for key in self.shapes if is_text_encoders(key)]

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """For each layer, as the file names it, the tensors' names of its alpha and of its update's.

        Raises:
            UserError: it holds something else.
        """
        layers: dict[str, dict[str, str]] = {}
        others = []
        for key in self.shapes.keys() - set(self.text_encoder_keys):
            name, part = divide(key)
            if part is None:
                others.append(key)
            elif part in layers.setdefault(name, {}):
                raise self._error(f"holds several adapters ({some_keys([layers[name][part], key])}): name one")
            else:
                layers[name][part] = key
        known = {name: parts for name, parts in layers.items() if kinds_of(parts)}
        others += [key for name, parts in layers.items() if name not in known for key in parts.values()]
        if others or not known:
            self._refuse(sorted(others), bool(known))
        return dict(sorted(layers.items()))

    @cached_property
    def empty(self) -> dict[str, Update]:
        """For each layer, as the file names it, its update without numbers.

        Raises:
            UserError: its tensors do not fit together.
        """
        found = {}
        for name, parts in self.parts.items():
            tensors = {part: torch.empty(self.shapes[key], device="meta") for part, key in parts.items()}
            try:
                found[name] = made_of(tensors)
            except ValueError as error:
                wide = any(one.ndim > 2 for one in tensors.values())
                what = "is for convolutions, too" if wide else "is damaged"
                raise self._error(f"{what}: {short_key(name)} has {error}") from error
        return found

    def check(self, names: LayerNames, base: str) -> dict[str, Meaning]:
        """What its layers are in a model, by the names that the file has for them.

        Args:
            base: the model's name.

        Raises:
            UserError: it was made for another model.
        """
        found: dict[str, Meaning] = {}
        unknown, wide = [], []
        for name, update in self.empty.items():
            meaning = names.meaning(name)
            if meaning is None:
                unknown.append(f"{short_key(name)} is not in the model")
                continue
            sides = names.sides_of(meaning.layers)
            wanted = sum(one.out_features for one in sides), sides[0].in_features
            out, width = update.sides
            if wanted != (out or wanted[0], width):
                wide.append(f"{short_key(name)} is {out or 'any'}x{width}, in the model {wanted[0]}x{wanted[1]}")
            found[name] = meaning
        if wrong := unknown + wide:
            made_for = (self.header or {}).get("base")
            hint = f"; it was made for {printable(str(made_for)[:150])}" if made_for else ""
            if not found:
                hint += "; looked for diffusers' names of the layers" + (" and for native ones" if names.native else "")
            raise self._error(f"does not fit {base}: {listing(wrong)}{hint}")
        return found

    def read(self, names: LayerNames, base: str) -> dict[str, Update]:
        """The updates of a model's layers, by diffusers' names, in float32.

        Raises:
            UserError: it was made for another model, or holds numbers that are not finite.
        """
        updates: dict[str, Update] = {}
        meanings = self.check(names, base)
        if self.text_encoder_keys:
            count = len(self.text_encoder_keys)
            log.warning(f"note: {self.path} is for text encoders too: {count} tensors are left out")
        with reading(self.path, "download it again"), safetensors.safe_open(self.path, framework="pt") as file:
            for name, parts in self.parts.items():
                tensors = {part: file.get_tensor(key).float() for part, key in parts.items()}
                if bad := [parts[part] for part, tensor in tensors.items() if not tensor.isfinite().all()]:
                    raise self._error(f"holds numbers that are not finite ({short_key(bad[0])}): it diverged")
                whole = self.empty[name].like(tensors)
                scale = self._scale(names, name, whole, tensors.get("alpha"))
                if not math.isfinite(scale):
                    raise ValueError(f"the alpha of {short_key(name)} is not finite")
                whole = whole if scale == 1 else whole.scaled(scale)
                for layer, update in split(whole, meanings[name], names).items():
                    if layer in updates:
                        raise self._error(f"has {layer} twice, once as {short_key(name)}: which is right?")
                    updates[layer] = update
        return {layer: updates[layer] for layer in names.sides if layer in updates}

    def scales(self, names: LayerNames) -> dict[str, float]:
        """alpha / rank of each layer, by the file's names of them, as `read` takes it."""
        found = {}
        with reading(self.path, "download it again"), safetensors.safe_open(self.path, framework="pt") as file:
            for name, parts in self.parts.items():
                alpha = file.get_tensor(parts["alpha"]) if "alpha" in parts else None
                found[name] = self._scale(names, name, self.empty[name], alpha)
        return found

    def _scale(self, names: LayerNames, name: str, update: Update, alpha: Tensor | None) -> float:
        """alpha / rank, wherever the file has its alpha; without one it is 1."""
        if alpha is not None:
            return 1.0 if update.divisor is None else float(alpha) / update.divisor
        meaning = names.meaning(name)
        return scale_of(self._peft_settings, name if meaning is None else meaning.layers[0], update)

    @cached_property
    def _peft_settings(self) -> Mapping[str, Any]:
        """peft's settings of the transformer's adapter: in diffusers' header, or in the file beside peft's weights."""
        if DIFFUSERS_KEY in self.metadata:
            return {key.removeprefix("transformer."): value for key, value in self._json(DIFFUSERS_KEY).items()}
        return settings_beside(self.path)

    def _json(self, key: str) -> dict[str, Any]:
        try:
            value = json.loads(self.metadata[key])
        except RecursionError as error:
            raise ValueError(f"its header {key} is nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError(f"its header {key} is none")
        return value

    def _error(self, text: str) -> UserError:
        return UserError(f"the LoRA {self.path} {text}")

    def _refuse(self, others: list[str], halves: bool) -> None:
        """Raise the UserError for tensors that Retouch cannot use."""
        if not others:
            text = ", only weights of text encoders" if self.text_encoder_keys else ""
            raise self._error(f"holds no layer of a transformer{text}")
        kind = other_kind(others)
        known = f"is {kind}" if kind and not halves else f"has {kind} in it" if kind else "holds more than a LoRA"
        raise UserError(
            f"{self.path} {known if halves or kind else 'is no LoRA'} ({some_keys(others)}), which Retouch does not "
            "read; it reads lora_A and lora_B or lora_down and lora_up of each layer, with alpha and DoRA's magnitude, "
            "and LoKr, LoHa and peft's OFT of linear layers"
        )
