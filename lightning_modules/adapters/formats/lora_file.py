"""LoRA files of any program: found, looked through without reading weights, and read as updates of a model's layers."""

import json
import logging
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from datamodules.errors import UserError, listing, printable
from datamodules.files import PICKLE, kind_of_file, reading
from lightning_modules.adapters.formats.conversion import split
from lightning_modules.adapters.formats.keys import TEXT_ENCODERS, divide, left_out, other_kind, short_key, some_keys
from lightning_modules.adapters.formats.names import LayerNames, Meaning
from lightning_modules.adapters.formats.peft_settings import not_understood, scale_of, settings_beside
from lightning_modules.adapters.kinds import kinds_of, made_of
from lightning_modules.adapters.ranks import Ranks
from lightning_modules.adapters.update import Unread, Update

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
    """A LoRA's safetensors file, of which opening reads the header alone; or a pickle of its tensors and nothing else.

    Attributes:
        path: of the file.
        metadata: what its header says beside the tensors.
        shapes: of its tensors.

    Raises:
        UserError: it is a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "name a LoRA's safetensors file, or download it again"):
            self._is_pickle = kind_of_file(path) == PICKLE
            if self._is_pickle:
                self.metadata: dict[str, str] = {}
                self.shapes = {key: tuple(tensor.shape) for key, tensor in self._pickled.items()}
                self.dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in self._pickled.items()}
                return
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if LARGEST_HEADER < length <= path.stat().st_size:
                raise ValueError(f"its header has {length:,} bytes")
            with safetensors.safe_open(path, framework="pt") as opened:
                self.metadata = opened.metadata() or {}
                self.shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
                self.dtypes = {key: str(opened.get_slice(key).get_dtype()) for key in self.shapes}
            if not all(key.isprintable() and len(key) <= LONGEST_NAME for key in self.shapes):
                raise ValueError("it has names that no layer has")

    @cached_property
    def _pickled(self) -> dict[str, Tensor]:
        try:
            zipped = zipfile.is_zipfile(self.path)
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError as error:
            raise self._error(
                "is a pickle that holds more than tensors, and may run code: convert it to safetensors"
            ) from error
        state = state.get("state_dict", state) if isinstance(state, dict) else {}
        if not state or not all(isinstance(one, Tensor) for one in state.values()):
            raise self._error("is a pickle of something else than a LoRA's tensors: name a safetensors file")
        return {str(key): tensor for key, tensor in state.items()}

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Yield the function that reads a tensor by its name."""
        if self._is_pickle:
            yield self._pickled.__getitem__
            return
        with safetensors.safe_open(self.path, framework="pt") as file:
            yield file.get_tensor

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
    def left_out(self) -> dict[str, list[str]]:
        """The tensors that Retouch leaves out, by what they are of."""
        found: dict[str, list[str]] = {}
        for key in self.shapes:
            if what := left_out(key):
                found.setdefault(what, []).append(key)
        return found

    @property
    def text_encoder_keys(self) -> list[str]:
        """The tensors of text encoders, which Retouch leaves out."""
        return self.left_out.get(TEXT_ENCODERS, [])

    @cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """For each layer, as the file names it, the tensors' names of its alpha and of its update's.

        Raises:
            UserError: it holds something else.
        """
        layers: dict[str, dict[str, str]] = {}
        others = []
        for key in self.shapes.keys() - {key for keys in self.left_out.values() for key in keys}:
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
            UserError: its tensors do not fit together, or peft's settings say that they mean something else.
        """
        with reading(self.path, "download it again"):
            setting = not_understood(self._peft_settings)
        if setting:
            raise self._error(
                f"was made by peft with {setting}, which Retouch does not read: save it as a plain LoRA there"
            )
        found = {}
        for name, parts in self.parts.items():
            tensors = {part: torch.empty(self.shapes[key], device="meta") for part, key in parts.items()}
            try:
                found[name] = made_of(tensors)
            except ValueError as error:
                wide = any(one.ndim > 2 for one in tensors.values())
                unread = "is of a form that Retouch does not read" if isinstance(error, Unread) else "is damaged"
                what = "is for convolutions, too" if wide else unread
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
        for what, keys in self.left_out.items():
            log.warning(f"note: {self.path} is for {what} too: {len(keys)} tensors are left out")
        with reading(self.path, "download it again"), self.opened() as tensor_of:
            for name, parts in self.parts.items():
                tensors = {part: tensor_of(key).float() for part, key in parts.items()}
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
        with reading(self.path, "download it again"), self.opened() as tensor_of:
            for name, parts in self.parts.items():
                alpha = tensor_of(parts["alpha"]) if "alpha" in parts else None
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
            settings = self._json(DIFFUSERS_KEY).items()
            return {key.removeprefix("transformer."): one for key, one in settings if not key.startswith("text_enc")}
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
            text = f", only weights of {' and '.join(self.left_out)}" if self.left_out else ""
            raise self._error(f"holds no layer of a transformer{text}")
        kind = other_kind(others)
        if not halves and kind is None and all(len(self.shapes[key]) < 2 or key.endswith("weight") for key in others):
            raise UserError(
                f"{self.path} holds a model's own weights ({some_keys(others)}) and no LoRA: a transformer is named by "
                "model.transformer_name_or_path"
            )
        known = f"is {kind}" if kind and not halves else f"has {kind} in it" if kind else "holds more than a LoRA"
        raise UserError(
            f"{self.path} {known if halves or kind else 'is no LoRA'} ({some_keys(others)}), which Retouch does not "
            "read; it reads lora_A and lora_B or lora_down and lora_up of each layer, with alpha and DoRA's magnitude, "
            "and LoKr, LoHa and peft's OFT of linear layers"
        )
