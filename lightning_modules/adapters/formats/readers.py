"""Which programs read a LoRA's file: measured with diffusers 0.42, peft 0.21, ComfyUI 0.33 and InvokeAI of 2026-08."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from datamodules.errors import listing
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


FLUX = {
    Names("transformer."),
    Names("diffusion_model.", native=True),
    Names("lora_unet_", native=True, flat=True),
    Names("lora_transformer_", flat=True),
    Names("lycoris_", flat=True),
}
# By `NativeNames.readers`; "" for a model whose own code has no other names, as Qwen-Image's.
COMFYUI = {
    "flux": {Names(""), *FLUX},
    "flux2": FLUX,
    "longcat": {Names(""), *FLUX},
    "z_image": {Names(""), Names("transformer."), Names("diffusion_model."), Names("lycoris_", flat=True)},
    "": {
        Names(""),
        Names("transformer."),
        Names("diffusion_model."),
        Names("lora_unet_", flat=True),
        Names("lycoris_", flat=True),
    },
}
# The same, for lora_A and lora_B, and for lora_down and lora_up: whether diffusers' load_lora_weights reads it.
DIFFUSERS = {
    ("flux", False): {Names("transformer.")},
    ("flux", True): {Names("lora_unet_", native=True, flat=True), Names("lora_transformer_", flat=True)},
    ("flux2", False): {
        Names("transformer."),
        Names("diffusion_model."),
        Names("diffusion_model.", native=True),
        Names("base_model.model.", native=True),
    },
    ("flux2", True): {Names("lora_unet_", native=True, flat=True)},
    ("z_image", False): {Names("transformer."), Names("diffusion_model.")},
    ("z_image", True): {Names("lora_unet_", flat=True)},
    ("", False): {Names("transformer."), Names("diffusion_model.")},
    ("", True): {Names("lora_unet_", flat=True)},
}
# Of FLUX's kin, the layers that ComfyUI knows by diffusers' names.
COMFYUI_LAYERS = (
    "transformer_blocks.",
    "single_transformer_blocks.",
    "x_embedder",
    "context_embedder",
    "time_text_embed.",
    "norm_out.",
    "proj_out",
)
INVOKEAI = {
    "flux": {Names("transformer."), Names("diffusion_model.", native=True)},
    "flux2": {Names("transformer.")},
    "z_image": {Names("transformer."), Names("diffusion_model.")},
    "": {Names("transformer.")},
}
# Layers by which InvokeAI knows a file of FLUX.1 with diffusers' names.
INVOKEAI_LAYERS = ("single_transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.add_q_proj")
PEFT = "base_model.model."
# Pipelines whose load_lora_weights reads LoKr; a transformer of any reads it by itself.
LOKR_LOADERS = ("Flux2", "ZImage")
COMFYUI_DORA = "nearly: it divides by the norms of the base's rows, not of the updated ones"
OTHERWISE = "task=export fuse=true writes a transformer that has it in its weights"
MASKED = "at its full rank at every timestep, not as it was trained; task=export rank=N writes one rank"


def readers(
    how: Format,
    names: LayerNames,
    layers: Iterable[str],
    pipeline_name: str,
    dora: bool = False,
    masked: bool = False,
    kind: str = "LoRA",
) -> list[Reader]:
    """What programs do with a file.

    Args:
        how: its names; of a file from elsewhere, those that it has.
        names: of the model's layers.
        layers: that it adapts, by diffusers' names.
        pipeline_name: of diffusers; the transformer loads files for one without load_lora_weights.
        dora: whether it is a DoRA.
        masked: whether it is a T-LoRA that has its rank schedule in its header, and all its components.
        kind: of its updates, as `Update.kind`.
    """
    named = Names(how.prefix, how.native and bool(names.native), how.flat)  # of Qwen-Image the same as diffusers'
    layers = list(layers)
    if loader_of(pipeline_name, kind) is None:
        by_diffusers = _transformer(how, named)
    else:
        by_diffusers = _diffusers(how, named, names.readers, layers, dora)
    by_comfyui = _comfyui(how, named, names.readers, layers, dora)
    if kind in ("LoHa", "OFT"):
        by_diffusers = Reader("diffusers", False, f"it has no {kind}; {OTHERWISE}")
    if kind == "OFT":
        by_comfyui = Reader("ComfyUI", False, f"its OFT turns outputs, and this one inputs; {OTHERWISE}")
    found = [by_comfyui, by_diffusers, _invokeai(named, names, layers, kind == "LoRA" and not dora)]
    if named == Names(PEFT):
        found.append(Reader("peft", True, "PeftModel.from_pretrained(transformer, FOLDER)"))
    if masked:
        found = [Reader(one.program, False, MASKED) if one.reads else one for one in found]
    return [*found, Reader("Retouch", True, "lora=, adapter.init_from=")]


def loader_of(pipeline_name: str, kind: str = "LoRA") -> Any:
    """The mixin by which a pipeline of diffusers loads LoRAs, known by its name; None for one that has none.

    The pipeline's own module would import the classes of its encoders, without which training on cached latents does.

    Args:
        kind: of updates, as `Update.kind`: few read other kinds than LoRA.
    """
    from diffusers.loaders import lora_pipeline

    end = "LoraLoaderMixin"
    starts = [name.removesuffix(end) for name in vars(lora_pipeline) if name.endswith(end)]
    longest = max((start for start in starts if start and pipeline_name.startswith(start)), key=len, default=None)
    if longest is None or (kind != "LoRA" and longest not in LOKR_LOADERS):
        return None
    return getattr(lora_pipeline, longest + end)


def _comfyui(how: Format, named: Names, table: str, layers: list[str], dora: bool) -> Reader:
    if named not in COMFYUI[table]:
        if named.prefix in (PEFT, "lora_transformer_", "lora_unet_"):
            return Reader("ComfyUI", False, "does not know these names; use format=comfyui")
        return Reader("ComfyUI", None, "nobody has tried these names; use format=comfyui")
    if dora and how.magnitude != DORA_SCALE:
        return Reader("ComfyUI", False, f"leaves {how.magnitude[0]} out, half of the DoRA; use format=comfyui")
    by_table = table in ("flux", "flux2", "longcat") and not named.native
    if by_table and (left_out := [layer for layer in layers if not layer.startswith(COMFYUI_LAYERS)]):
        which = f"{len(left_out)} of {len(layers)} layers under these names ({listing(left_out)})"
        return Reader("ComfyUI", False, f"leaves out {which}; use format=comfyui")
    return Reader("ComfyUI", True, COMFYUI_DORA if dora else "")


def _invokeai(named: Names, names: LayerNames, layers: list[str], plain: bool) -> Reader:
    if names.readers not in INVOKEAI:
        return Reader("InvokeAI", False, "does not know the model")
    if not plain:
        return Reader("InvokeAI", False, f"reads no DoRA, LoKr, LoHa and OFT as they are; {OTHERWISE}")
    best = "comfyui" if names.readers == "flux" else "diffusers"
    if named not in INVOKEAI[names.readers]:
        return Reader("InvokeAI", None, f"nobody has tried these names; use format={best}")
    if names.readers == "flux" and not named.native:
        double = [group for native, group in names.native.items() if native.startswith("double")]
        whole = all(len(set(group) - set(layers)) in (0, len(group)) for group in double)
        foreign = any(layer.startswith("norm_out.") or "guidance_embedder" in layer for layer in layers)
        if foreign or not whole or not set(INVOKEAI_LAYERS) <= set(layers):
            return Reader("InvokeAI", False, f"wants other layers under these names; use format={best}")
    return Reader("InvokeAI", True)


def _diffusers(how: Format, named: Names, table: str, layers: list[str], dora: bool) -> Reader:
    """By load_lora_weights of the model's pipeline."""
    if named == Names(PEFT):
        return _transformer(how, named)
    if named not in DIFFUSERS[table, how.halves == DOWN_UP]:
        return Reader("diffusers", False, "does not know these names; use format=diffusers")
    # Other names are converted, and of a DoRA only the halves are.
    as_in_diffusers = {Names("transformer."), *([Names("diffusion_model.")] if table == "flux2" else [])}
    if dora and named not in as_in_diffusers:
        return Reader("diffusers", False, f"leaves {how.magnitude[0]} out, half of the DoRA; use format=diffusers")
    if left_out := [layer for layer in layers if not _converted(named, table, layer)]:
        return Reader("diffusers", False, f"does not read {left_out[0]} under these names; use format=diffusers")
    widths = table == "flux" and how.halves == DOWN_UP and named.native
    return Reader("diffusers", True, "pipe.load_lora_weights(...)" + (", at the real model's widths" if widths else ""))


def _transformer(how: Format, named: Names) -> Reader:
    """By load_lora_adapter of the model's transformer, which converts no names."""
    if named != Names(named.prefix) or not named.prefix.endswith(".") or how.halves == DOWN_UP:
        return Reader("diffusers", False, "does not know these names; use format=diffusers")
    prefix = how.prefix.removesuffix(".")
    return Reader("diffusers", True, f"pipe.transformer.load_lora_adapter(FOLDER, prefix={prefix!r}, weight_name=...)")


def _converted(named: Names, table: str, layer: str) -> bool:
    """Whether diffusers' conversion knows the layer: of FLUX in kohya's blocks alone, of others attention."""
    if table == "flux2" and named == Names("diffusion_model."):
        return "transformer_blocks." in layer
    if table == "flux2":
        return not named.native or layer != "norm_out.linear"  # whose halves it forgets to swap
    if table == "z_image":
        return not named.native or not layer.startswith(("all_x_embedder.", "all_final_layer."))
    in_block = "transformer_blocks." in layer
    if table == "flux" and named.prefix == "lora_unet_":
        return in_block
    return named.prefix != "lora_transformer_" or not in_block or ".attn." in layer
