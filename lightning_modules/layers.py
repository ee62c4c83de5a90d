"""The linear layers of a family's transformer: the default targets of adapters, and names outside of diffusers."""

from typing import NamedTuple

from lightning_modules.lora_files.names import NO_NATIVE_NAMES, NativeNames

ATTENTION = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0")
TEXT_ATTENTION = ("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out")
# The MLPs of FLUX.1's double blocks, of the image's tokens and of the text's.
MLPS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


class Layers(NamedTuple):
    """The linear layers of a transformer.

    Attributes:
        native: their names in other programs' LoRA files.
        targets: name endings of the layers that are adapted by default.
        output: pattern of the last projection, which `all-linear` leaves out.
        flattened: patterns of layers that see the tokens of all samples as one row, so that a rank mask cannot address
            single samples; `all-linear` leaves them out.
    """

    native: NativeNames = NO_NATIVE_NAMES
    targets: tuple[str, ...] = ATTENTION
    output: str = "proj_out"
    flattened: tuple[str, ...] = ()


ALIKE = Layers()
