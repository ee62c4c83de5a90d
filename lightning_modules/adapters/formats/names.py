"""The names that programs give a transformer's layers in LoRA files, and which of its layers each of them means."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from lightning_modules.layers import NativeNames

if TYPE_CHECKING:
    from lightning_modules.pretrained.frozen_base import FrozenBase

# What may stand before a layer's name, and whose files have it.
PREFIXES = {
    "transformer.": "diffusers",
    "diffusion_model.": "ComfyUI",
    "model.diffusion_model.": "ComfyUI",
    "base_model.model.": "peft",
    "pipe.": "DiffSynth",
    "dit.": "DiffSynth",
    "unet.": "diffusers",
    "model.": "a trainer",
    "lora_unet__": "kohya",
    "lora_unet_": "kohya",
    "lora_transformer_": "OneTrainer",
    "lycoris_": "LyCORIS",
}


class Sides(NamedTuple):
    """Of a linear layer's weight."""

    out_features: int
    in_features: int


class Meaning(NamedTuple):
    """What a name in a file stands for.

    Attributes:
        layers: of the transformer, whose outputs it gives one after the other.
        swapped: whether the two halves of its outputs stand the other way round in the transformer.
    """

    layers: tuple[str, ...]
    swapped: bool = False


class LayerNames:
    """The linear layers of a transformer, by all names that they have in files.

    Args:
        transformer: it may be on the meta device, and have adapters.
        native: the names in the model's own code.
    """

    def __init__(self, transformer: nn.Module, native: NativeNames) -> None:
        self.sides: dict[str, Sides] = {}
        for name, module in transformer.named_modules():
            if isinstance(module, nn.Linear) and ".lora_" not in name:
                self.sides[name.replace(".base_layer", "")] = Sides(module.out_features, module.in_features)
        self.swapped = frozenset(native.swapped)
        self.readers = native.readers
        self.native = self._in_blocks(native.layers)
        self._meanings: dict[str, Meaning] = {}
        for known in ({name: (name,) for name in self.sides}, self.native, self._in_blocks(native.read_only)):
            for name, layers in known.items():
                # Where it is called as in diffusers, its halves stand as there.
                swapped = name not in self.sides and layers[0] in self.swapped
                self._meanings[name] = self._meanings[flat(name)] = Meaning(layers, swapped)

    @classmethod
    def of(cls, base: "FrozenBase") -> "LayerNames":
        """Those of a base's transformer."""
        return cls(base.source.meta, base.family_class.layers.native)

    def meaning(self, name: str) -> Meaning | None:
        """What a file means by this name, with any of `PREFIXES`; None where the transformer has no such layer."""
        if name in self._meanings:
            return self._meanings[name]
        shorter = (self.meaning(name.removeprefix(prefix)) for prefix in PREFIXES if name.startswith(prefix))
        return next((meaning for meaning in shorter if meaning is not None), None)

    def sides_of(self, layers: Iterable[str]) -> list[Sides]:
        """Of several layers."""
        return [self.sides[layer] for layer in layers]

    def _in_blocks(self, patterns: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """The names of all blocks that the transformer has."""
        found = {}
        numbers = sorted({int(part) for name in self.sides for part in name.split(".") if part.isdigit()})
        for native, layers in patterns.items():
            for number in numbers if "{}" in native else [0]:
                named = tuple(layer.format(number) for layer in layers)
                if all(layer in self.sides for layer in named):
                    found[native.format(number)] = named
        return found


class OwnNames(LayerNames):
    """The layers of a file by its own names without a prefix, where it is not known what model they are of.

    Args:
        sides: by the file's names.
    """

    def __init__(self, sides: Mapping[str, Sides]) -> None:
        bare = {name: without_prefixes(name) for name in sides}
        self.sides = {bare[name]: one for name, one in sides.items()}
        self.native, self.swapped, self.readers = {}, frozenset(), ""
        self._meanings = {name: Meaning((own,)) for name, own in bare.items()}


def without_prefixes(name: str) -> str:
    """Remove all of `PREFIXES` that a layer's name begins with."""
    while found := next(filter(name.startswith, PREFIXES), None):
        name = name.removeprefix(found)
    return name


def flat(name: str) -> str:
    """A layer's name as kohya's tools write it."""
    return name.replace(".", "_")
