"""A model's weights on disk, in 16 bits or quantized: reading tensors, loading layer by layer, writing."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from foundation.errors import UserError
from foundation.files import TEXT, reading, replacing, with_short_header
from lightning_modules.lora_files.names import WRAPPERS
from lightning_modules.quantization.linear import QuantizedLinear
from lightning_modules.quantization.quantization import QUANTIZATIONS, Quantization, return_freed_memory
from lightning_modules.timing import ProgressLines

log = logging.getLogger("retouch")

GET_AGAIN = "download it again"
# Bytes read before a file is reopened: pages of a mapped file stay in memory as long as it is open.
REOPEN_AFTER = 128 * 2**20
# Bytes at which a new file begins.
FILE_SIZE = 2 * 10**9


class Weights:
    """Tensors by name. Subclasses define `map`, or `read` if they compute each tensor."""

    dtypes: dict[str, str]  # by safetensors' names
    shapes: dict[str, tuple[int, ...]]
    notes: dict[str, dict[str, Any]]  # ComfyUI's, of how layers are quantized, by layer

    def map(self, name: str) -> Tensor:
        """Return a tensor without copying it, if possible."""
        return self.read(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor that the caller may keep."""
        return self.map(name).clone()

    @cached_property
    def format(self) -> str | None:
        """The format of its quantized linear layers; None for 16 or 32 bits."""
        for name, dtype in self.dtypes.items():
            for format, row in QUANTIZATIONS.items():
                if row.detect(name, dtype):
                    return format
        return None


class SafetensorsWeights(Weights):
    """The tensors of a model's safetensors files, each in one `files`, by their names without wrappers of training."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.dtypes, self.shapes, self.notes = {}, {}, {}
        self.files, self._stored = dict[str, Path](), dict[str, str]()
        for file in files:
            with reading(file, GET_AGAIN), safe_open(with_short_header(file), "pt") as opened:
                metadata = json.loads((opened.metadata() or {}).get("_quantization_metadata", "{}"))
                notes = metadata.get("layers", {})
                for stored in opened.keys():  # noqa: SIM118 (not a dict)
                    part, name = opened.get_slice(stored), WRAPPERS.sub("", stored)
                    if name in self.files:
                        both = f"{self.files[name]} and {file} both contain {name}"
                        twice = f"{file} contains {name} twice, as {self._stored[name]} and {stored}"
                        raise UserError(f"{twice if self.files[name] == file else both}: {GET_AGAIN}")
                    self.dtypes[name], self.shapes[name] = part.get_dtype(), tuple(part.get_shape())
                    self.files[name], self._stored[name] = file, stored
                    if name.endswith(".comfy_quant"):
                        if math.prod(part.get_shape()) > TEXT:
                            raise ValueError(f"{stored} is larger than a note")
                        notes[name.removesuffix(".comfy_quant")] = json.loads(bytes(opened.get_tensor(stored).tolist()))
                self.notes |= {layer: {**note.get("params", {}), **note} for layer, note in notes.items()}
        self._open: tuple[Path, Any] | None = None
        self._touched = 0

    def map(self, name: str) -> Tensor:
        """Return a tensor in its file's memory: pages are read on use, and the system may drop them."""
        file = self.files[name]
        if self._open is None or self._open[0] != file or self._touched > REOPEN_AFTER:
            self._open, self._touched = (file, safe_open(file, "pt").__enter__()), 0
        tensor = self._open[1].get_tensor(self._stored[name])
        self._touched += tensor.nbytes
        return tensor


def assemble(
    model: nn.Module,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    placement: Callable[[str], torch.device] | None = None,
) -> None:
    """Fill a model whose parameters are on the meta device, layer by layer.

    It never needs more memory than the filled model and a few copies of a layer.

    Args:
        dtype: the dtype of unquantized weights; the model keeps some in float32.
        quantization: quantizes linear layers that have more bits on disk; None keeps them.
        placement: returns the final device of a parameter or layer; None for `device`.
    """
    place = placement or (lambda name: device)
    # Names, not modules: a layer that is replaced must be freed at once.
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name in linears if f"{name}.weight" in weights.dtypes]  # others are tied
    converted = set()
    if quantization is not None:
        dtypes = quantization.source_dtypes
        found = [name for name in names if weights.dtypes[f"{name}.weight"] in dtypes]
        converted = {name for name in found if quantization.converts(name, model.get_submodule(name))}
    progress = ProgressLines(len(names), "layers")
    layer: nn.Module | None
    for number, name in enumerate(names, 1):
        linear: Any = model.get_submodule(name)
        if quantization is not None and name in converted:
            stored = stored_layer(linear, name, weights, device, dtype)
            if stored is None:
                parts = [part for part, _ in linear.named_parameters()]
                tensors = {part: weights.read(f"{name}.{part}").to(device, dtype) for part in parts}
            else:
                tensors = {"weight": stored.dequantize(dtype)} | ({} if stored.bias is None else {"bias": stored.bias})
            linear.load_state_dict(tensors, assign=True)
            del tensors, stored
            layer = quantization.quantize(linear).to(place(name))
        else:
            layer = stored_layer(linear, name, weights, place(name), dtype)
        del linear
        if layer is not None:
            model.set_submodule(name, layer)
            return_freed_memory()
        progress.done(number)
    # A mapped file would keep its pages in memory for the few tensors that are used: those are copied.
    read = weights.read if converted else weights.map
    # Models of transformers have both lists: the longer one is for float16.
    own = getattr(model, "_keep_in_fp32_modules", None)
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", own) or ())
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = read(name).to(place(name), torch.float32 if kept & set(name.split(".")) else dtype)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    for name, buffer in list(model.named_buffers()):
        if name in weights.dtypes:  # otherwise it is computed
            buffer = read(name).to(dtype)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(place(name)))
    return_freed_memory()


def rotated_group(note: dict[str, Any]) -> int:
    """Return how many inputs are rotated together according to ComfyUI's note of a layer; 1 for none."""
    return note.get("convrot_groupsize", 256) if note.get("convrot") else 1


def stored_layer(
    linear: nn.Linear, name: str, weights: Weights, device: torch.device, dtype: torch.dtype
) -> QuantizedLinear | None:
    """Return the layer as it is quantized on disk, on the CPU mapped from its file; None if it is not quantized."""
    dtype_on_disk = weights.dtypes[f"{name}.weight"]
    row = next((row for row in QUANTIZATIONS.values() if dtype_on_disk in row.dtypes), None)
    if row is None:
        return None
    start = f"{name}."
    parts = {key[len(start) :]: weights.map(key).to(device) for key in weights.dtypes if key.startswith(start)}
    if "bias" in parts:
        parts["bias"] = parts["bias"].to(dtype)
    group = rotated_group(weights.notes.get(name, {}))
    layer = row.read(parts, name, dtype, group)
    _require_shape(name, (layer.out_features, layer.in_features), (linear.out_features, linear.in_features))
    return layer


def _require_shape(name: str, on_disk: Sequence[Any], wanted: Sequence[Any]) -> None:
    if tuple(on_disk) != tuple(wanted):
        stored, own = ("x".join(map(str, shape)) for shape in (on_disk, wanted))
        raise UserError(f"{name} is {stored} on disk, {own} in the model")


def save_quantized(transformer: Any, quantization: Quantization, folder: Path) -> None:
    """Write a quantized transformer in a layout that `assemble` reads; diffusers reads 4 and 8 bits too."""
    from diffusers import BitsAndBytesConfig
    from huggingface_hub import save_torch_state_dict

    state = {name: tensor.contiguous() for name, tensor in transformer.state_dict().items()}
    for name, module in transformer.named_modules():
        if isinstance(module, QuantizedLinear) and module.group > 1:  # as ComfyUI notes it
            note = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": module.group}
            state[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    plain = [name for name, module in transformer.named_modules() if type(module) is nn.Linear]
    format, four_bit = quantization.format, QUANTIZATIONS[quantization.format].is_four_bit
    # diffusers must not read our scales as its own.
    how = {"quant_method": f"retouch_{format}"}
    if not any(name.endswith(".weight_scale") for name in state):
        how = BitsAndBytesConfig(
            load_in_8bit=not four_bit,
            load_in_4bit=four_bit,
            llm_int8_skip_modules=plain,
            bnb_4bit_quant_type=format if four_bit else "fp4",
            bnb_4bit_compute_dtype=transformer.dtype,
        ).to_dict()
    transformer.save_config(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": how}
    path.write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(state, folder, filename_pattern=pattern, max_shard_size=FILE_SIZE)


def write_tensors(path: Path, shapes: dict[str, torch.Size], dtype: torch.dtype, read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time; the library's own writer needs all of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stored, end = "BF16" if dtype == torch.bfloat16 else f"F{8 * dtype.itemsize}", 0
    for name in sorted(shapes):
        start, end = end, end + shapes[name].numel() * dtype.itemsize
        header[name] = {"dtype": stored, "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    progress = ProgressLines(len(shapes), "tensors")
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, name in enumerate(sorted(shapes), 1):
            tensor = read(name).to(dtype)
            _require_shape(name, tensor.shape, shapes[name])
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
            return_freed_memory()
            progress.done(number)
