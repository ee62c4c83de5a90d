"""Single files of weights, safetensors or GGUF: their tensors by the names of a model in diffusers."""

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from hydra.utils import get_class
from torch import Tensor, nn

from foundation.catalogue import shipped_models
from foundation.errors import UserError, listing
from foundation.files import GGUF, PICKLES, kind_of_file, reading
from foundation.notes import note_once
from lightning_modules.lora_files.delta import swap_halves
from lightning_modules.lora_files.names import LayerNames, Meaning, NativeNames, in_blocks
from lightning_modules.pretrained.checks import NOT_READ, check_names, check_notes
from lightning_modules.pretrained.repository import SUFFIXES, meta_component
from lightning_modules.pretrained.weights import GET_AGAIN, SafetensorsWeights, Weights, write_tensors
from lightning_modules.quantization.linear import HINTS, SCALED
from lightning_modules.quantization.quantization import MARKERS

# Most reads of a GGUF file's header, a few for each key and tensor, and words of a vocabulary in it.
MOST_READS, MOST_WORDS = 60_000, 2**20
# A layer's tensor: the layer and the part.
PART = re.compile(rf"(.+?)\.((?:weight|bias|SCB|weight_format|{SCALED})(?:\.[\w.]+)?)")


def single_file(name: str, key: str) -> Path | None:
    """Return the path of a single file of weights; None for the name of a repository.

    Args:
        key: the setting of the name, for a file that does not exist.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() not in (*SUFFIXES, *PICKLES) or path.is_dir():
        return None
    if not path.is_file():
        raise UserError(f"{key}={name}: the file does not exist. Correct the path.")
    return path


def open_file(path: Path) -> Weights:
    """Open a file; raise a UserError if it is damaged, or no model that is read."""
    if path.suffix.lower() in PICKLES:
        raise UserError(f"{path} is {kind_of_file(path) or 'a pickle of PyTorch'}: save it as .safetensors")
    weights = GGUFWeights(path) if path.suffix.lower() == ".gguf" else SafetensorsWeights([path])
    check_notes(weights, str(path))
    return weights


def _bounded(reader: type[Any]) -> type[Any]:
    """Return gguf's reader, which ends at the end of the file, and after many keys: an array may claim any length.

    It reads an array of numbers at once, and passes over vocabularies.
    """
    from gguf import GGUFValueType

    class Reader(reader):
        left = MOST_READS

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.left -= 1
            if self.left < 0 or int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("its header does not end")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, start: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(start, raw_type)
            (kind,), (length,) = self._get(start, np.uint32), self._get(start + 4, np.uint64)
            kind, length, end = GGUFValueType(kind), int(length), start + 12
            if dtype := self.gguf_scalar_to_np.get(kind):
                values = self._get(end, dtype, length)
                return 12 + int(values.nbytes), [values], [0], [GGUFValueType.ARRAY, kind]
            if kind != GGUFValueType.STRING or length > MOST_WORDS:
                raise ValueError(f"its header has an array of {length:,} values of the type {kind.name}")
            size, content = "<Q" if self.byte_order == "I" else ">Q", memoryview(self.data)
            for _ in range(length):
                end += 8 + struct.unpack_from(size, content, end)[0]
            return end - start, [], [], [GGUFValueType.ARRAY, kind]

    return Reader


class GGUFWeights(Weights):
    """The tensors of a GGUF file, each dequantized to float32 when it is read.

    Attributes:
        type: the type of most weights, such as Q4_K.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise UserError(f"{path}: reading GGUF needs the gguf package. Run pip install gguf.") from error
        self.dtypes, self.shapes, self.notes = {}, {}, {}
        self._last = "", torch.empty(0)
        counts: Counter[str] = Counter()
        with reading(path, GET_AGAIN, GGUF):
            reader = _bounded(gguf.GGUFReader)(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            for name, tensor in self._tensors.items():
                counts[tensor.tensor_type.name] += int(tensor.n_elements)
                # ComfyUI-GGUF's, of tensors whose rows do not fit the blocks.
                original = reader.get_field(f"comfy.gguf.orig_shape.{name}")
                shape = tensor.shape[::-1] if original is None else original.contents()
                self.shapes[name] = tuple(map(int, shape))
                self.dtypes[name] = "F32"
            self.type = max(counts, key=counts.__getitem__)
            for kind in {tensor.tensor_type for tensor in reader.tensors} - {gguf.GGMLQuantizationType.F32}:
                gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)

    def map(self, name: str) -> Tensor:
        """Return a tensor; a matrix is kept for the next layer that is a part of it."""
        from gguf import dequantize

        if self._last[0] == name:
            return self._last[1]
        tensor = self._tensors[name]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(self.shapes[name])
        if values.dim() > 1:
            self._last = name, values
        return values


class TensorPlace(NamedTuple):
    """The place of a model's tensor in a file.

    Attributes:
        name: the tensor's name in the file.
        rows: the rows of a tensor that several layers share; None for all.
        swapped: whether the halves of the rows are in reverse order.
        shape: the shape in the model; None for the file's.
    """

    name: str
    rows: slice | None = None
    swapped: bool = False
    shape: tuple[int, ...] | None = None


class NamedWeights(Weights):
    """A file's tensors by their names in a model, and under their own names those that it does not know."""

    def __init__(self, weights: Weights, places: Mapping[str, TensorPlace]) -> None:
        self._weights, self._places = weights, places
        self.dtypes = {name: weights.dtypes[place.name] for name, place in places.items()}
        self.shapes = {}
        for name, (stored, rows, _, wanted) in places.items():
            shape = weights.shapes[stored]
            shape = (len(range(shape[0])[rows]), *shape[1:]) if rows else shape
            self.shapes[name] = wanted if wanted and math.prod(wanted) == math.prod(shape) else shape
        layers = {(name.rpartition(".")[0], place.name.rpartition(".")[0]) for name, place in places.items()}
        self.notes = {own: weights.notes[layer] for own, layer in layers if layer in weights.notes}

    def map(self, name: str) -> Tensor:
        stored, rows, swapped, _ = self._places[name]
        tensor = self._weights.map(stored)
        tensor = tensor[rows].clone() if rows else tensor  # parts of one storage would be saved once
        return swap_halves(tensor, swapped).reshape(self.shapes[name])


def name_tensors(weights: Weights, path: Path, model: Any, native: NativeNames) -> NamedWeights:
    """Return a transformer's tensors by diffusers' names; raise a UserError unless the file is for such a transformer.

    Args:
        model: a transformer on the meta device.
        native: the names of its layers and tensors in its authors' code.
    """
    places, others = _places(weights, path, model, native)
    named = NamedWeights(weights, places)
    try:
        check_names(named, model, str(path))
    except UserError as error:
        raise UserError(_fitting(weights, path) or str(error)) from error
    for mark, setting in native.marks.items():
        if not model.config.get(setting) and any(name.endswith(mark) for name in weights.dtypes):
            raise UserError(f"{path} has {mark}: it needs a model.pretrained_model_name_or_path with {setting}")
    if others:
        note_once(f"{listing(sorted(others))} of {path.name} are not used: only its transformer is")
    if any(name.endswith(HINTS) for name in named.dtypes):
        note_once(f"the scales of inputs in {path.name} are not used: inputs are scaled by their own size")
    return named


def _places(
    weights: Weights, path: Path, model: nn.Module, native: NativeNames
) -> tuple[dict[str, TensorPlace], set[str]]:
    """Return the places of a transformer's tensors, and the first words of the names that lack its prefix."""
    layers, own = LayerNames(model, native), dict(model.named_parameters())
    tensors = in_blocks({name: (one,) for name, one in native.tensors.items()}, own)
    starts: Counter[str] = Counter()  # prefixes of checkpoints, by how many known names follow them
    for name in weights.dtypes:
        rests = (name[i:] for i, letter in enumerate(f".{name}") if letter == ".")
        starts.update([name.removesuffix(rest) for rest in rests if rest in own or rest in tensors][:1])
    start = max(starts, key=lambda one: (starts[one], "ema" not in one), default="")
    places: dict[str, TensorPlace] = {}
    others = set()
    for name in weights.dtypes:
        key = name.removeprefix(start)
        if any(re.fullmatch(pattern, key) for pattern in native.unused):
            continue
        if not name.startswith(start) and name not in MARKERS:
            others.add(name.partition(".")[0])
            continue
        part = PART.fullmatch(key)
        meaning = layers.meaning(part[1]) if part and key not in own else None
        if part and meaning:
            joined = len(meaning.layers) > 1 or meaning.swapped
            if joined and weights.dtypes[name] == "U8" and part[2] == "weight":
                raise UserError(f"{path} has {name} in 4 bits, which cannot be split into layers, {NOT_READ}")
            found = _split(name, part[2], meaning, weights.shapes[name], layers)
        else:
            [one] = tensors.get(key, (key,))
            found = {one: TensorPlace(name, shape=tuple(own[one].shape) if key in tensors else None)}
        put(places, found, str(path))
    return places, others


def put(places: dict[str, TensorPlace], found: Mapping[str, TensorPlace], where: str) -> None:
    """Add the places of tensors; raise a UserError for a tensor that is there twice."""
    if twice := found.keys() & places.keys():
        names = f"{places[min(twice)].name} and {found[min(twice)].name}"
        raise UserError(f"{where} has {min(twice)} twice, as {names}: {GET_AGAIN}")
    places |= found


def _split(
    name: str, part: str, meaning: Meaning, shape: tuple[int, ...], layers: LayerNames
) -> dict[str, TensorPlace]:
    """Return the places of the tensors of several layers in the tensor of the layer that joins them."""
    rows = [layers.shapes[layer].out_features for layer in meaning.layers]
    names = [f"{layer}.{part}" for layer in meaning.layers]
    if not shape or shape[0] != sum(rows) or shape[0] == 1:  # such as a scale of all
        return dict.fromkeys(names, TensorPlace(name))
    parts = [slice(end - count, end) for count, end in zip(rows, accumulate(rows), strict=True)]
    return {
        one: TensorPlace(name, part_rows if len(parts) > 1 else None, meaning.swapped)
        for one, part_rows in zip(names, parts, strict=True)
    }


def _fitting(weights: Weights, path: Path) -> str:
    """Return the known models whose transformer a file contains, in words; "" if there is none."""
    found = []
    for known, folder in shipped_models():
        model, family = meta_component(str(folder), "transformer"), cast(Any, get_class(known.target))
        with suppress(UserError):
            places, _ = _places(weights, path, model, family.layers.native)
            check_names(NamedWeights(weights, places), model, "")
            found.append(known)
    names = " or ".join(known.name for known in found)
    return f"{path} is a transformer of {found[0].base}. Choose model={names}." if found else ""


def save_native(path: Path, read: Callable[[str], Tensor], model: Any, native: NativeNames, dtype: torch.dtype) -> None:
    """Write a transformer to a safetensors file by the names of its authors, with one tensor in memory at a time.

    Args:
        read: returns a tensor of the model, which is on the meta device.
    """
    own, names = dict(model.named_parameters()), LayerNames(model, native)
    known = in_blocks({name: (one,) for name, one in native.tensors.items()}, own)
    for layer, layers in (names.native | in_blocks(native.read_only, names.shapes)).items():
        known |= {f"{layer}.{part}": tuple(f"{one}.{part}" for one in layers) for part in ("weight", "bias")}
    places: dict[str, tuple[str, ...]] = {key: () for key, setting in native.marks.items() if model.config.get(setting)}
    left = set(own)
    for name, parts in known.items():
        if left.issuperset(parts):
            left.difference_update(parts)
            places[name] = parts

    def join(name: str, read: Callable[[str], Tensor]) -> Tensor:
        parts = places.get(name, (name,))
        tensor = torch.cat([read(part) for part in parts]) if parts else torch.empty(0)
        tensor = swap_halves(tensor, any(part.rpartition(".")[0] in names.swapped for part in parts))
        return tensor.flatten() if re.fullmatch(native.flat, name) else tensor

    shapes = {name: join(name, own.__getitem__).shape for name in (*places, *left)}
    write_tensors(path, shapes, dtype, lambda name: join(name, read))
