"""A transformer's weights on disk, in 16 bits or quantized: read one tensor at a time."""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from datamodules.files import reading
from lightning_modules.quantization.formats import FORMATS
from lightning_modules.quantization.stored import OnDisk

GET_AGAIN = "download it again"
# safetensors' names of dtypes that are not quantized.
PLAIN = ("F64", "F32", "BF16", "F16")
IN_16_BITS = (
    "name a repository of plain 16-bit weights; model/quantization=fp8 or fp4 makes it smaller while it is loaded"
)
# Tensors of other programs, by name and dtype.
FOREIGN = {
    r"\.(?:wscales|wtscale|wcscales|smooth_factor|smooth|proj_down) ": "SVDQuant weights of nunchaku",
    r"\.(?:qweight|qzeros|g_idx) ": "GPTQ or AWQ weights",
    r"\.(?:weight_scale_2 |weight_scale F8_E4M3$)": "nvfp4 weights",
    r"\.(?:weight_scale|scale_weight) (?:U8|F8_E8M0)$": "mxfp8 weights",
    r"\.weight_scale_inv ": "fp8 weights with a scale for each block",
    r"\.weight_packed ": "weights of compressed-tensors",
    r"\.(?:weight\._(?:data|scale)|weight:\w+|_weight_\w+) ": "weights of torchao or quanto",
    r"\blora_|\.lora\.": "a LoRA beside its own weights",
}
# ComfyUI's names of the formats that are read, by the weights' dtypes; what else its notes may say.
COMFY = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8_tensorwise"}
HARMLESS = {"full_precision_matrix_mult", "per_row", "per_channel"}
# Pages of a file stay in memory as long as it is open.
REOPEN_AFTER = 128 * 2**20


class Weights(Protocol):
    """Tensors by name. `dtypes` are safetensors' names of theirs."""

    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor:
        """One of them, for the caller to keep; several threads may."""

    def map(self, name: str) -> Tensor:
        """One of them where it is."""
        return self.read(name)


class SafetensorsWeights(Weights):
    """The tensors of a model's safetensors files, and ComfyUI's notes of how its layers are quantized."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.dtypes: dict[str, str] = {}
        self._file: dict[str, Path] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        for file in files:
            with reading(file, GET_AGAIN), safe_open(file, "pt") as opened:
                self.notes |= json.loads((opened.metadata() or {}).get("_quantization_metadata", "{}")).get(
                    "layers", {}
                )
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    self.dtypes[name] = opened.get_slice(name).get_dtype()
                    self._file[name] = file
                    if name.endswith(".comfy_quant"):
                        note = json.loads(bytes(opened.get_tensor(name).tolist()))
                        self.notes[name.removesuffix(".comfy_quant")] = note
        self._open: tuple[Path, Any] | None = None
        self._touched = 0
        self._lock = threading.Lock()

    def read(self, name: str) -> Tensor:
        return self.map(name).clone()

    def map(self, name: str) -> Tensor:
        """One of them in its file: pages are read when they are used, and the system may drop them."""
        with self._lock:
            file = self._file[name]
            if self._open is None or self._open[0] != file or self._touched > REOPEN_AFTER:
                self._open, self._touched = (file, safe_open(file, "pt").__enter__()), 0
            tensor = self._open[1].get_tensor(name)
            self._touched += tensor.nbytes
            return tensor

    def on_meta(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Their shapes, as tensors of this dtype."""
        shapes = {}
        for file in sorted(set(self._file.values())):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = torch.empty(opened.get_slice(name).get_shape(), dtype=dtype, device="meta")
        return shapes

    @cached_property
    def format(self) -> str | None:
        """The format that linear layers are quantized in; None for 16 or 32 bits."""
        for name, dtype in self.dtypes.items():
            for format, row in FORMATS.items():
                if row.on_disk is not None and row.on_disk.detect(name, dtype):
                    return format
        return None


def check_names(weights: SafetensorsWeights, model: nn.Module, where: str) -> None:
    """Compare the tensors on disk with those of a model, which may be on the meta device: each must have its place.

    Raises:
        UserError: a tensor is missing, is quantized in an unknown way, or has no place in the model.
    """
    dtypes = weights.dtypes
    refuse_foreign(dtypes, where)
    parameters = [name for name, _ in model.named_parameters()]
    if missing := [name for name in parameters if name not in dtypes]:
        raise UserError(f"{where} lacks {listing(missing)}: is it complete, and made for {type(model).__name__}?")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    plain = {name for name in parameters if dtypes[name] in PLAIN}
    known = plain.union(*(layout.check(dtypes, layers, where) for layout in layouts()))
    if strange := [name for name in parameters if name not in known]:
        raise UserError(
            f"{where} has {listing(strange)} in {dtypes[strange[0]]}, whose scales are not known: {IN_16_BITS}"
        )
    refuse_unexpected([name for name in dtypes if name not in known], where)
    for layer, note in weights.notes.items():
        how = dict(note)
        wanted = COMFY.get(dtypes.get(f"{layer}.weight", ""))
        if how.pop("format", None) != wanted or any(how[key] for key in how.keys() - HARMLESS):
            shown = ", ".join(f"{key} {value}" for key, value in note.items())
            raise UserError(f"{where} has {layer} quantized in an unknown way ({shown}): {IN_16_BITS}")


def refuse_foreign(dtypes: Mapping[str, str], where: str) -> None:
    """Raise a UserError for files with tensors of quantizations that are not read, or of a LoRA."""
    for name, dtype in dtypes.items():
        for pattern, what in FOREIGN.items():
            if re.search(pattern, f"{name} {dtype}"):
                raise UserError(f"{where} holds {what} ({name}), which is not read: {IN_16_BITS}")


def refuse_unexpected(names: Sequence[str], where: str) -> None:
    """Raise a UserError for tensors that the model has no place for."""
    if names:
        raise UserError(
            f"{where} has {listing(sorted(names))}, for which its model has no place: they would be "
            f"left out; {IN_16_BITS}"
        )


def refuse_method(config: Mapping[str, Any], where: str, known: str = "bitsandbytes") -> None:
    """Raise a UserError where a model's config.json names a quantization whose name does not match `known`."""
    method = (config.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if not re.fullmatch(known, method):
        raise UserError(f"{where} is quantized by {method}, which is not read: {IN_16_BITS}")


def check_library_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Look at a model's files that its library reads, which takes integers for numbers, and leaves out scales.

    Args:
        config: its config.json.

    Raises:
        UserError: they are quantized, or the config names a quantization other than bitsandbytes'.
    """
    refuse_method(config, str(folder))
    dtypes = SafetensorsWeights(folder.glob("*.safetensors")).dtypes
    refuse_foreign(dtypes, str(folder))
    companions = re.compile("|".join(rf"\.(?:{layout.companions})$" for layout in layouts()))
    integers = re.compile(r"(?:weight|bias) (?!F|BF)")
    quantized = [name for name, kind in dtypes.items() if companions.search(name) or integers.search(f"{name} {kind}")]
    if quantized and not config.get("quantization_config"):
        raise UserError(f"{folder} is quantized ({listing(quantized)}), which a transformer alone may be: {IN_16_BITS}")


def layouts() -> list[OnDisk]:
    """Of all formats that have one."""
    return [row.on_disk for row in FORMATS.values() if row.on_disk is not None]
