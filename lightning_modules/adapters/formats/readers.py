"""Which programs read a LoRA's file: measured with diffusers 0.42 and peft 0.21, of ComfyUI by its code."""

from collections.abc import Iterable
from typing import NamedTuple

from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import DORA_SCALE, DOWN_UP, Format


class Reader(NamedTuple):
    """What a program makes of a file.

    Attributes:
        reads: whether it has the effect that it was trained for; None where nobody has tried.
        note: how to load it, or what is wrong.
    """

    program: str
    reads: bool | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.note == MASKED:
            return f"read {self.note}"
        found = {True: "reads it", False: "does not read it", None: "not tried"}[self.reads]
        return f"{found}: {self.note}" if self.note else found


class Names(NamedTuple):
    """How a file names layers: what stands before, whether as in the model's own code, whether with _ for each dot."""

    prefix: str
    native: bool = False
    flat: bool = False


# By whether a model's own code has names of its own, as FLUX's has, and Qwen-Image's has not.
COMFYUI = {
    True: {
        Names(""),
        Names("transformer."),
        Names("diffusion_model.", native=True),
        Names("lora_unet_", native=True, flat=True),
        Names("lora_transformer_", flat=True),
        Names("lycoris_", flat=True),
    },
    False: {
        Names(""),
        Names("transformer."),
        Names("diffusion_model."),
        Names("lora_unet_", flat=True),
        Names("lycoris_", flat=True),
    },
}
# The same, for lora_A and lora_B, and for lora_down and lora_up: whether diffusers' load_lora_weights reads it.
DIFFUSERS = {
    (True, False): {Names("transformer.")},
    (True, True): {Names("lora_unet_", native=True, flat=True), Names("lora_transformer_", flat=True)},
    (False, False): {Names("transformer."), Names("diffusion_model.")},
    (False, True): {Names("lora_unet_", flat=True)},
}
PEFT = "base_model.model."
COMFYUI_DORA = "nearly: it divides by the norms of the base's rows, not of the updated ones"
MASKED = "at its full rank at every timestep, not as it was trained; task=export rank=N writes one rank"


def readers(
    how: Format, names: LayerNames, layers: Iterable[str], dora: bool = False, masked: bool = False
) -> list[Reader]:
    """What programs do with a file.

    Args:
        how: its names; of a file from elsewhere, those that it has.
        names: of the model's layers.
        layers: that it adapts, by diffusers' names.
        dora: whether it is a DoRA.
        masked: whether it is a T-LoRA that has its rank schedule in its header, and all its components.
    """
    own = bool(names.native)
    named = Names(how.prefix, how.native and own, how.flat)  # of Qwen-Image the same as diffusers'
    found = [_comfyui(how, named, own, dora), _diffusers(how, named, own, list(layers), dora)]
    if named == Names(PEFT):
        found.append(Reader("peft", True, "PeftModel.from_pretrained(transformer, FOLDER)"))
    if masked:
        found = [Reader(one.program, False, MASKED) if one.reads else one for one in found]
    return [*found, Reader("Retouch", True, "lora=, adapter.init_from=")]


def _comfyui(how: Format, named: Names, own: bool, dora: bool) -> Reader:
    if named not in COMFYUI[own]:
        if named.prefix in (PEFT, "lora_transformer_"):
            return Reader("ComfyUI", False, "does not know these names; use format=comfyui")
        return Reader("ComfyUI", None, "nobody has tried these names; use format=comfyui")
    if dora and how.magnitude != DORA_SCALE:
        return Reader("ComfyUI", False, f"leaves {how.magnitude[0]} out, half of the DoRA; use format=comfyui")
    return Reader("ComfyUI", True, COMFYUI_DORA if dora else "")


def _diffusers(how: Format, named: Names, own: bool, layers: list[str], dora: bool) -> Reader:
    """By load_lora_weights of the model's pipeline."""
    if named == Names(PEFT):
        return Reader(
            "diffusers", True, f"pipe.transformer.load_lora_adapter(FOLDER, prefix={PEFT[:-1]!r}, weight_name=...)"
        )
    if named not in DIFFUSERS[own, how.halves == DOWN_UP]:
        return Reader("diffusers", False, "does not know these names; use format=diffusers")
    if dora and named != Names("transformer."):  # the others are converted, and only their halves are
        return Reader("diffusers", False, f"leaves {how.magnitude[0]} out, half of the DoRA; use format=diffusers")
    if left_out := [layer for layer in layers if own and not _converted(named, layer)]:
        return Reader("diffusers", False, f"does not read {left_out[0]} under these names; use format=diffusers")
    widths = own and how.halves == DOWN_UP and named.native
    return Reader("diffusers", True, "pipe.load_lora_weights(...)" + (", at the real model's widths" if widths else ""))


def _converted(named: Names, layer: str) -> bool:
    """Whether diffusers' conversion of FLUX's files knows the layer: of kohya's blocks alone, of others attention."""
    in_block = "transformer_blocks." in layer
    if named.prefix == "lora_unet_":
        return in_block
    return named.prefix != "lora_transformer_" or not in_block or ".attn." in layer
