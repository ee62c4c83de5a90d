"""Names in LoRA files: of a transformer's layers, in every program's spelling, and of the tensors of a layer."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

# Prefixes of layer names: diffusers', ComfyUI's, peft's, DiffSynth's, trainers', kohya's, OneTrainer's and LyCORIS'.
PREFIXES = (
    *("transformer.", "diffusion_model.", "model.diffusion_model.", "base_model.model.", "pipe.", "dit.", "unet."),
    *("model.", "lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_"),
)
# Endings of a layer's tensors. peft includes the adapter's name unless it saves the file itself.
PART_ENDINGS = {
    "down": re.compile(r"\.(?:lora_A(?:\.[^.]+)?|lora_down|lora\.down)\.weight$"),
    "up": re.compile(r"\.(?:lora_B(?:\.[^.]+)?|lora_up|lora\.up)\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
    "magnitude": re.compile(r"\.(?:lora_magnitude_vector(?:\.[^.]+){0,2}|dora_scale|magnitude)$"),
}
# LyCORIS and peft name the tensors of other kinds as `Delta.parts` does.
FACTORS = re.compile(
    r"\.(lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|oft_R(?=(?:\.default)?\.weight$))(?:\.default)?(?:\.weight)?$"
)
# x-flux: double_blocks.0.processor.qkv_lora1.down.weight
X_FLUX = re.compile(r"(?<=_lora|lora[12])\.(down|up)\.weight$")
# Wrappers of modules in training (compiling, DDP, FSDP, DeepSpeed, checkpointing), anywhere in a name.
WRAPPERS = re.compile(
    r"(?:^|(?<=[._]))(?:_orig_mod[._]|(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|module)\.)"
)
# Tensors that are ignored with a note, by what they belong to.
IGNORED = {
    "text encoders": re.compile(
        r"(base_model\.model\.)?(lora_te\d*_|text_encoders?(_\d)?\.|te\d?\.|t5xxl\.|clip_[lg]\.)"
    ),
    "biases and norms": re.compile(r".*\.(diff_b|[wb]_norm)$|.*norm[^.]*\.(weight\.)?diff$"),
    "bookkeeping": re.compile(r"_aux\."),
    "embeddings": re.compile(r"bundle_emb\.|emb_params$|string_to_param\."),
}
# Adapters that are not read, by words in the names of their tensors.
OTHER_ADAPTERS = {"lora_E": "AdaLoRA", "vera_": "VeRA", "ia3_": "IA3", "boft_": "BOFT", "oft_": "OFT"}


class NativeNames(NamedTuple):
    """Names in a model's own code, where they differ from diffusers' names.

    In all names `{}` is the index of a block.

    Attributes:
        layers: the layers of diffusers whose outputs a native layer concatenates, by its name.
        read_only: further names in files. LoRAs are not written with them; whole models are, if `layers` has none.
        swapped: layers of diffusers whose native counterparts have the two halves of the outputs in reverse order.
        readers: the model in compatibility.py's rules for ComfyUI.
        saved: native names in the files of runs as well, if ComfyUI reads no others and diffusers converts these; it
            reads a LoKr by its own names only.
        tensors: the tensors outside of linear layers by native name; if one has several names, the first is written.
        flat: a regular expression for tensors that are vectors in native files, with the same values in order.
        unused: regular expressions of whole names: tensors in native files that the transformer does not have.
        marks: tensors of files for transformers of which a setting, named here, is true.
    """

    layers: Mapping[str, tuple[str, ...]] = {}
    read_only: Mapping[str, tuple[str, ...]] = {}
    swapped: tuple[str, ...] = ()
    readers: str = ""
    saved: tuple[str, ...] = ()
    tensors: Mapping[str, str] = {}
    flat: str = ""
    unused: tuple[str, ...] = ()
    marks: Mapping[str, str] = {}


NO_NATIVE_NAMES = NativeNames()


class LayerShape(NamedTuple):
    """Shape of a linear layer's weight."""

    out_features: int
    in_features: int


class Meaning(NamedTuple):
    """The layers that a name in a file stands for.

    Attributes:
        layers: layers of the transformer, whose outputs the named layer concatenates.
        swapped: whether the two halves of its outputs are in reverse order in the transformer.
    """

    layers: tuple[str, ...]
    swapped: bool = False


class LayerNames:
    """The linear layers of a transformer, by all their names in files.

    Args:
        transformer: it may be on the meta device, and have adapters; of an unknown model only its layers' shapes.
        native: the names of its layers in the model's own code.

    Attributes:
        shapes: the shape of each layer by diffusers' name.
    """

    def __init__(
        self, transformer: nn.Module | Mapping[str, LayerShape], native: NativeNames = NO_NATIVE_NAMES
    ) -> None:
        self.shapes: dict[str, LayerShape] = {}
        for name, layer in transformer.named_modules() if isinstance(transformer, nn.Module) else transformer.items():
            if isinstance(layer, nn.Linear | LayerShape) and ".lora_" not in name:
                self.shapes[name.replace(".base_layer", "")] = LayerShape(layer.out_features, layer.in_features)
        self.swapped = frozenset(native.swapped)
        self.readers = native.readers
        self.native = in_blocks(native.layers, self.shapes)
        self.saved = in_blocks({name: native.layers[name] for name in native.saved}, self.shapes)
        self._meanings: dict[str, Meaning] = {}
        for known in ({name: (name,) for name in self.shapes}, self.native, in_blocks(native.read_only, self.shapes)):
            for name, layers in known.items():
                # A layer with diffusers' name has its halves in diffusers' order.
                swapped = name not in self.shapes and layers[0] in self.swapped
                self._meanings[name] = self._meanings[flat(name)] = Meaning(layers, swapped)

    def meaning(self, name: str) -> Meaning | None:
        """Return the layers that a file's name stands for, with any of `PREFIXES`; None for an unknown name."""
        if name in self._meanings:
            return self._meanings[name]
        shorter = (self.meaning(name.removeprefix(prefix)) for prefix in PREFIXES if name.startswith(prefix))
        return next((meaning for meaning in shorter if meaning is not None), None)


def in_blocks(patterns: Mapping[str, tuple[str, ...]], known: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Insert the indices of a transformer's blocks into native names of layers or tensors that are known."""
    found = {}
    blocks = sorted({int(part) for name in known for part in name.split(".") if part.isdigit()})
    for native, names in patterns.items():
        for block in blocks if "{}" in native else [0]:
            named = tuple(name.format(block) for name in names)
            if all(name in known for name in named):
                found[native.format(block)] = named
    return found


def flat(name: str) -> str:
    """Spell a layer's name as kohya's tools do."""
    return name.replace(".", "_")


def split_key(key: str) -> tuple[str, str | None]:
    """Split a tensor's name into its layer's name and its part; the part is None for an unknown tensor."""
    key = WRAPPERS.sub("", key)
    if found := X_FLUX.search(key) or FACTORS.search(key):
        return key[: found.start()], found[1]
    for part, end in PART_ENDINGS.items():
        if found := end.search(key):
            return key[: found.start()], part
    return key, None


def ignored(key: str) -> str | None:
    """Return what an ignored tensor belongs to, a key of `IGNORED`; None for all others."""
    key = WRAPPERS.sub("", key)
    return next((owner for owner, names in IGNORED.items() if names.match(key)), None)
