"""LoRA files of any program: found, looked through without reading weights, and read as updates of a model's layers."""

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from datamodules.errors import UserError, listing, printable
from datamodules.files import reading
from lightning_modules.adapters.formats.conversion import split
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME
from lightning_modules.adapters.formats.keys import divide, is_text_encoders, other_kind
from lightning_modules.adapters.formats.names import LayerNames, Meaning
from lightning_modules.adapters.low_rank import LowRank

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
            if not all(isinstance(part, dict) for part in (header, header.get("adapter", {}), header.get("model", {}))):
                raise ValueError(f"its header {HEADER_KEY} is none of ours")
        return header or None

    @property
    def adapter(self) -> dict[str, Any]:
        """What the header says of the adapter; nothing in a file from elsewhere."""
        return (self.header or {}).get("adapter") or {}

    @property
    def trained_scale(self) -> float | None:
        """alpha / rank as it was trained, which the weights have in them; None in a file from elsewhere."""
        with reading(self.path, "name a LoRA's safetensors file, or download it again"):
            alpha, rank = (float(self.adapter.get(name, 0)) for name in ("alpha", "rank"))
            return alpha / rank if alpha > 0 and rank > 0 else None

    @cached_property
    def text_encoder_keys(self) -> list[str]:
        """The tensors of text encoders, which Retouch leaves out."""
        return [key for key in self.shapes if is_text_encoders(key)]

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """For each layer, as the file names it, the tensors' names of its down, up, alpha and magnitude.

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
                raise UserError(f"the LoRA {self.path} holds several adapters ({layers[name][part]}, {key}): name one")
            else:
                layers[name][part] = key
        halves = {name: parts for name, parts in layers.items() if "down" in parts or "up" in parts}
        others += [key for name, parts in layers.items() if name not in halves for key in parts.values()]
        if others or not halves:
            self._refuse(sorted(others), bool(halves))
        if unpaired := sorted(parts.popitem()[1] for parts in halves.values() if not {"down", "up"} <= parts.keys()):
            raise UserError(f"the LoRA {self.path} is incomplete: {_some(unpaired)} without the other half")
        return dict(sorted(halves.items()))

    def check(self, names: LayerNames, base: str) -> dict[str, Meaning]:
        """What its layers are in a model, by the names that the file has for them.

        Args:
            base: the model's name.

        Raises:
            UserError: it was made for another model.
        """
        found, wrong = {}, []
        for name, parts in self.parts.items():
            down, up = self.shapes[parts["down"]], self.shapes[parts["up"]]
            meaning = names.meaning(name)
            if len(down) != 2 or len(up) != 2 or down[0] != up[1] or down[0] == 0:
                what = "is for convolutions, too" if len(down) > 2 else "is damaged"
                raise UserError(f"the LoRA {self.path} {what}: {name} has matrices of {down} and {up}")
            if meaning is None:
                wrong.append(f"{name} is not in the model")
                continue
            sides = names.sides_of(meaning.layers)
            wanted = sum(one.out_features for one in sides), sides[0].in_features
            if wanted != (up[0], down[1]):
                wrong.append(f"{name} is {up[0]}x{down[1]}, in the model {wanted[0]}x{wanted[1]}")
            found[name] = meaning
        if wrong:
            made_for = (self.header or {}).get("base")
            hint = f"; it was made for {printable(str(made_for)[:150])}" if made_for else ""
            if not found:
                hint += "; looked for diffusers' names of the layers" + (" and for native ones" if names.native else "")
            raise UserError(f"the LoRA {self.path} does not fit {base}: {_some(wrong)}{hint}")
        return found

    def read(self, names: LayerNames, base: str) -> dict[str, LowRank]:
        """The updates of a model's layers, by diffusers' names, in float32.

        Raises:
            UserError: it was made for another model, or holds numbers that are not finite.
        """
        updates: dict[str, LowRank] = {}
        meanings = self.check(names, base)
        with reading(self.path, "download it again"), safetensors.safe_open(self.path, framework="pt") as file:
            for name, parts in self.parts.items():
                tensors = {part: file.get_tensor(key).float() for part, key in parts.items()}
                if bad := [parts[part] for part, tensor in tensors.items() if not tensor.isfinite().all()]:
                    raise UserError(f"the LoRA {self.path} holds numbers that are not finite ({bad[0]}): it diverged")
                rank = tensors["down"].shape[0]
                scale = self._scale(names, name, rank, tensors.get("alpha"))
                magnitude = self._magnitude(parts, tensors)
                whole = LowRank(tensors["down"], tensors["up"] * scale, magnitude)
                for layer, update in split(whole, meanings[name], names).items():
                    if layer in updates:
                        raise UserError(f"the LoRA {self.path} has {layer} twice, once as {name}: which is right?")
                    updates[layer] = update
        return {layer: updates[layer] for layer in names.sides if layer in updates}

    def scales(self, names: LayerNames) -> dict[str, float]:
        """alpha / rank of each layer, by the file's names of them, as `read` takes it."""
        found = {}
        with reading(self.path, "download it again"), safetensors.safe_open(self.path, framework="pt") as file:
            for name, parts in self.parts.items():
                alpha = file.get_tensor(parts["alpha"]) if "alpha" in parts else None
                found[name] = self._scale(names, name, self.shapes[parts["down"]][0], alpha)
        return found

    def _scale(self, names: LayerNames, name: str, rank: int, alpha: Tensor | None) -> float:
        """alpha / rank, wherever the file has its alpha; without one it is 1."""
        if alpha is not None:
            return float(alpha) / rank
        settings = self._peft_settings
        if "lora_alpha" not in settings:
            return 1.0
        meaning = names.meaning(name)
        layer = name if meaning is None else meaning.layers[0]
        pattern = settings.get("alpha_pattern") or {}
        try:
            alphas = (pattern[key] for key in pattern if re.match(rf"(.*\.)?({key})$", layer))  # as peft does
            own = next(alphas, settings["lora_alpha"])
        except re.error as error:
            raise ValueError(f"alpha_pattern: {error}") from error
        return float(own) / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    @cached_property
    def _peft_settings(self) -> Mapping[str, Any]:
        """peft's settings of the transformer's adapter: in diffusers' header, or in the file beside peft's weights."""
        config = self.path.with_name(PEFT_CONFIG_NAME)
        if DIFFUSERS_KEY in self.metadata:
            settings = self._json(DIFFUSERS_KEY)
            return {key.removeprefix("transformer."): value for key, value in settings.items()}
        if self.path.name == PEFT_WEIGHTS_NAME and config.is_file():
            with reading(config, "download it again"):
                settings = json.loads(config.read_text(encoding="utf-8"))
                if not isinstance(settings, dict):
                    raise ValueError("it is no settings of peft")
                return settings
        return {}

    def _magnitude(self, parts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Tensor | None:
        """DoRA's (out,); ComfyUI has it as (out, 1)."""
        if "magnitude" not in tensors:
            return None
        magnitude, rows = tensors["magnitude"], tensors["up"].shape[0]
        if magnitude.shape not in ((rows,), (rows, 1)):
            raise UserError(
                f"the LoRA {self.path}: {parts['magnitude']} is {tuple(magnitude.shape)}: Retouch reads DoRA with a "
                "number for each output"
            )
        return magnitude.flatten()

    def _json(self, key: str) -> dict[str, Any]:
        try:
            value = json.loads(self.metadata[key])
        except RecursionError as error:
            raise ValueError(f"its header {key} is nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError(f"its header {key} is none")
        return value

    def _refuse(self, others: list[str], halves: bool) -> None:
        """Raise the UserError for tensors that Retouch cannot use."""
        if not others:
            text = ", only weights of text encoders" if self.text_encoder_keys else ""
            raise UserError(f"the LoRA {self.path} holds no layer of a transformer{text}")
        kind = other_kind(others)
        known = f"is {kind}" if kind and not halves else f"has {kind} in it" if kind else "holds more than a LoRA"
        raise UserError(
            f"{self.path} {known if halves or kind else 'is no LoRA'} ({_some(others)}), which Retouch does not "
            "read; it reads lora_A and lora_B or lora_down and lora_up of each layer, with alpha and DoRA's magnitude"
        )


def _some(names: list[str]) -> str:
    """A few of a file's names, which may be of any length."""
    return listing([name if len(name) <= 150 else f"{name[:150]}..." for name in names])
