"""What is to be known of a transformer's layers: which LoRA adapts, and their names outside of diffusers."""

from collections.abc import Mapping
from typing import NamedTuple


class NativeNames(NamedTuple):
    """How a model's own code names the layers of its transformer, where that is not as diffusers does.

    In all names `{}` is the number of a block.

    Attributes:
        layers: by native name the layers of diffusers, whose outputs the native one gives one after the other.
        read_only: the same, of names in which files come and none is written.
        swapped: layers of diffusers whose outputs' halves are there the other way round.
        readers: what programs know of these names, by the tables of formats/readers.py.
    """

    layers: Mapping[str, tuple[str, ...]] = {}
    read_only: Mapping[str, tuple[str, ...]] = {}
    swapped: tuple[str, ...] = ()
    readers: str = ""


NO_NATIVE_NAMES = NativeNames()


ATTENTION = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0")
TEXT_ATTENTION = ("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out")
# The MLPs of FLUX.1's double blocks, of the image's tokens and of the text's.
MLPS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


class Layers(NamedTuple):
    """The linear layers of a transformer.

    Attributes:
        native: their names in other programs' LoRA files.
        targets: name endings of the layers that are adapted by default.
        output: pattern of the projection to the picture, which `all-linear` leaves out.
        flattened: patterns of those that see the tokens of all samples as one row, where no rank mask can tell samples
            apart; `all-linear` leaves them out.
    """

    native: NativeNames = NO_NATIVE_NAMES
    targets: tuple[str, ...] = ATTENTION
    output: str = "proj_out"
    flattened: tuple[str, ...] = ()


ALIKE = Layers()
