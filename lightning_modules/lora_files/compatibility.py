"""Programs that read a LoRA file: a table of measured verdicts, and a check by diffusers' own loader.

Measured with diffusers 0.42, peft 0.21 and ComfyUI 0.33.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from foundation.errors import UserError, listing
from foundation.files import reason
from lightning_modules.lora_files.delta import Delta, LowRank
from lightning_modules.lora_files.kinds import Kronecker, common_kind
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import DORA_SCALE, FORMATS

# Kinds of deltas that diffusers reads.
IN_DIFFUSERS = ("LoRA", "DoRA", "LoKr")
# Pipelines whose load_lora_weights reads LoKr; the load_lora_adapter of every transformer does.
LOKR_LOADERS = ("Flux2", "ZImage")
# By format, the models (`NativeNames.readers`; "": those without native names) whose load_lora_weights reads it.
DIFFUSERS = {
    "diffusers": ("flux", "flux2", "flux3", "krea2", "z_image", "qwen21", ""),
    "comfyui": ("flux2", "flux3", "krea2", "z_image", "qwen21", ""),
    "kohya": ("flux", "flux2", "z_image", "qwen21", ""),
    "onetrainer": ("flux",),
}
# The layers of FLUX and similar models that ComfyUI knows by diffusers' names.
COMFYUI_LAYERS = (
    *("transformer_blocks.", "single_transformer_blocks.", "x_embedder", "context_embedder", "time_text_embed."),
    *("norm_out.", "proj_out"),
)
# Layers of Qwen-Image-2.1 that ComfyUI joins, and finds in files by diffusers' names with diffusers' prefix only.
JOINED = re.compile(r"\.img_mlp\.(proj|gate_layer)$")
COMFYUI_DORA = "nearly: it divides by the row norms of the base's weights, not of the updated ones"
UNTRIED = "by its names; no ComfyUI that knows FLUX.3 was measured"
FUSE = "task=export fuse=true writes a transformer that includes it"
MASKED = "at its full rank at every timestep, not as it was trained; task=export rank=N writes one rank"
UNKNOWN_NAMES = "does not know these names"


class Reader(NamedTuple):
    """A program's verdict on a file.

    Attributes:
        reads: whether the file has the effect that it was trained for.
        note: how to load it, or the problem.
    """

    program: str
    reads: bool
    note: str = ""

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.note == MASKED:
            return f"read {self.note}"
        return ("reads it" if self.reads else "does not read it") + (f": {self.note}" if self.note else "")


def readers(
    format: str,
    names: LayerNames,
    layers: Iterable[str],
    pipeline_name: str,
    kind: str = "LoRA",
    masked: bool = False,
) -> list[Reader]:
    """Return each program's verdict on a file.

    Args:
        format: a key of `FORMATS`.
        layers: the adapted ones, by diffusers' names.
        pipeline_name: of diffusers.
        kind: kind of its deltas.
        masked: whether it is a T-LoRA with its rank schedule in the header, and with all its components.
    """
    layers = list(layers)
    found = [_comfyui(format, names, layers, kind), _diffusers(format, names, layers, pipeline_name, kind)]
    if format == "peft":
        found.append(Reader("peft", True, "PeftModel.from_pretrained(transformer, FOLDER)"))
    if masked:
        found = [Reader(one.program, False, MASKED) if one.reads else one for one in found]
    return [*found, Reader("Retouch", True, "lora=, adapter.init_from=")]


def _comfyui(format: str, names: LayerNames, layers: list[str], kind: str) -> Reader:
    if kind == "OFT":
        return Reader("ComfyUI", False, f"its OFT rotates outputs, and this one inputs; {FUSE}")
    others = {"z_image": ["kohya"], "flux3": ["onetrainer"]}
    if format in ["peft", *others.get(names.readers, [])]:
        return Reader("ComfyUI", False, f"{UNKNOWN_NAMES}; use format=comfyui")
    joined = names.readers == "qwen21" and any(map(JOINED.search, layers))
    if kind == "DoRA" and FORMATS[format].magnitude != DORA_SCALE:
        instead = FUSE if joined else "use format=comfyui"
        return Reader("ComfyUI", False, f"ignores lora_magnitude_vector, half of the DoRA; {instead}")
    if joined and format not in ("diffusers", "onetrainer"):
        instead = FUSE if kind == "DoRA" else "use format=diffusers"
        return Reader("ComfyUI", False, f"ignores img_mlp.proj and img_mlp.gate_layer; {instead}")
    saved = tuple(layer for group in names.saved.values() for layer in group if kind != "LoKr")
    ignored = [layer for layer in layers if not layer.startswith(saved if names.saved else COMFYUI_LAYERS)]
    if ignored and names.readers in ("flux", "flux2", "flux3", "longcat") and not FORMATS[format].native:
        which = f"{len(ignored)} of {len(layers)} layers under these names ({listing(ignored)})"
        return Reader("ComfyUI", False, f"ignores {which}; use format=comfyui")
    note = UNTRIED if names.readers == "flux3" else COMFYUI_DORA if kind == "DoRA" else ""
    return Reader("ComfyUI", True, note)


def _diffusers(format: str, names: LayerNames, layers: list[str], pipeline_name: str, kind: str) -> Reader:
    if kind not in IN_DIFFUSERS:
        return Reader("diffusers", False, f"it has no {kind}; {FUSE}")
    with_pipeline = format != "peft" and loader_of(pipeline_name, kind) is not None
    # The transformer's load_lora_adapter converts no names.
    own = format in ("diffusers", "peft") or (format == "comfyui" and not names.native)
    if names.readers not in DIFFUSERS[format] if with_pipeline else not own:
        return Reader("diffusers", False, f"{UNKNOWN_NAMES}; use format=diffusers")
    if not with_pipeline:
        prefix = FORMATS[format].prefix.removesuffix(".")
        call = f"pipe.transformer.load_lora_adapter(FOLDER, prefix={prefix!r}, weight_name=...)"
        return Reader("diffusers", True, call)
    # It converts names, and of a DoRA only the projections.
    if kind == "DoRA" and FORMATS[format].magnitude == DORA_SCALE:
        return Reader("diffusers", False, "ignores dora_scale, half of the DoRA; use format=diffusers")
    if ignored := [layer for layer in layers if not _converts(format, names, layer)]:
        return Reader("diffusers", False, f"does not read {ignored[0]} under these names; use format=diffusers")
    widths = ", at the real model's widths" if format == "kohya" and names.readers == "flux" else ""
    return Reader("diffusers", True, f"pipe.load_lora_weights(...){widths}")


def _converts(format: str, names: LayerNames, layer: str) -> bool:
    """Return whether diffusers' conversion of names knows a layer."""
    in_block = "transformer_blocks." in layer
    if names.readers == "flux" and format == "kohya":
        return in_block
    if names.readers == "flux" and format == "onetrainer":
        return not in_block or ".attn." in layer
    if names.readers == "qwen21" and format == "kohya":
        return not layer.endswith("_layer") and not layer.startswith("modulation.")
    if names.readers == "flux2" and FORMATS[format].native:
        return layer != "norm_out.linear"  # it forgets to swap its halves
    if names.readers == "flux3" and FORMATS[format].native:
        return "blocks." in layer
    return True


def loader_of(pipeline_name: str, kind: str = "LoRA") -> Any:
    """Return the mixin by which a pipeline of diffusers loads deltas of a kind, found by its name; None without one.

    The pipeline's own module would import its encoders' classes, which training on cached latents never imports.
    """
    from diffusers.loaders import lora_pipeline

    end = "LoraLoaderMixin"
    starts = [name.removesuffix(end) for name in vars(lora_pipeline) if name.endswith(end)]
    longest = max((start for start in starts if start and pipeline_name.startswith(start)), key=len, default=None)
    if longest is None or (kind == "LoKr" and longest not in LOKR_LOADERS):
        return None
    return getattr(lora_pipeline, longest + end)


def read_back(path: Path, names: LayerNames, pipeline_name: str, transformer: Any) -> str:
    """Check a file in diffusers' format as `check_with_diffusers`; return the programs' verdicts in words."""
    file = LoRAFile(path)
    deltas = file.read(names, pipeline_name)
    kind = common_kind(deltas.values())
    found = readers("diffusers", names, deltas, pipeline_name, kind, "rank_schedule" in file.adapter)
    if kind in IN_DIFFUSERS:
        try:
            check_with_diffusers(path, deltas, pipeline_name, transformer)
        except UserError as error:
            if kind != "LoKr":
                raise
            # It refuses a LoKr whose layers share no factor; ComfyUI needs none.
            found = [Reader("diffusers", False, str(error)) if one.program == "diffusers" else one for one in found]
    return "; ".join(f"{one.program}: {one.verdict}" for one in found if one.program != "Retouch")


def check_with_diffusers(path: Path, deltas: Mapping[str, Delta], pipeline_name: str, transformer: Any) -> None:
    """Raise a UserError unless the loader of diffusers' pipeline reads these deltas from a file.

    Args:
        transformer: without an adapter, on the meta device; it stays unchanged.
    """
    copy, loader = _without_memory(transformer), loader_of(pipeline_name, common_kind(deltas.values()))
    try:
        if loader is None:
            copy.load_lora_adapter(path.parent, weight_name=path.name, prefix="transformer", adapter_name="check")
        else:
            pipeline = type("Pipeline", (TransformerOnly, loader), {})(copy)
            pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name="check")
    except Exception as error:  # another library's loader may raise anything
        why = f"diffusers' {pipeline_name} cannot load it: {reason(error)}"
        raise UserError(f"{path} is written, but {why}") from error
    require_loaded(copy, "check", deltas, path)


class TransformerOnly:
    """A pipeline with nothing but a transformer, as far as diffusers' loaders look."""

    components: ClassVar[dict[str, Any]] = {}
    hf_device_map = text_encoder = text_encoder_2 = None

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer


def _without_memory(transformer: Any) -> Any:
    """Copy a transformer with zeros that take no memory, on the CPU: loaders move their tensors to the weights."""
    copy = deepcopy(transformer)
    for module in copy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return copy


@torch.no_grad()
def require_loaded(transformer: nn.Module, adapter_name: str, deltas: Mapping[str, Delta], path: Path) -> None:
    """Raise a UserError unless a loader has put exactly these deltas of a file into a transformer."""
    loaded = peft_deltas(transformer, adapter_name)
    wrong = sorted(loaded.keys() ^ deltas.keys())
    wrong += [name for name in loaded.keys() & deltas.keys() if not _is_same(loaded[name], deltas[name])]
    if wrong:
        raise UserError(f"{path}: diffusers read it wrongly: {listing(wrong)} differ from the file. Please report it")


def _is_same(loaded: Delta, expected: Delta) -> bool:
    """Return whether a loaded delta has the effect of the expected one."""
    x = torch.randn(expected.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
    dtype = next(iter(loaded.tensors().values())).dtype
    own = loaded.to(torch.float32, "cpu")
    # If the parts of a delta nearly cancel, rounding dominates the rest: the rounded delta is right as well.
    effects = [one.apply(x) for one in (expected, expected.to(dtype).to(torch.float32))]
    same = any(torch.allclose(own.apply(x), one, rtol=0, atol=0.02 * float(one.abs().max())) for one in effects)
    magnitude, wanted = (one.tensors().get("magnitude") for one in (own, expected))
    if magnitude is None or wanted is None:
        return same and magnitude is wanted
    return same and torch.allclose(magnitude.float(), wanted, rtol=0.01)


def peft_deltas(transformer: nn.Module, adapter_name: str) -> dict[str, Delta]:
    """Return the deltas that peft's layers compute for an adapter, in its dtype, by the names of the layers."""
    from peft.tuners.lokr import LoKrLayer
    from peft.tuners.lora import LoraLayer

    found: dict[str, Delta] = {}
    for name, module in transformer.named_modules():
        if not isinstance(module, LoraLayer | LoKrLayer) or adapter_name not in module._get_available_adapters():
            continue
        layer: Any = module
        if isinstance(module, LoraLayer):
            down, up = (half[adapter_name].weight.detach() for half in (layer.lora_A, layer.lora_B))
            vector = layer.lora_magnitude_vector[adapter_name].weight if layer.use_dora.get(adapter_name) else None
            delta: Delta = LowRank(down, up, None if vector is None else vector.detach())
        else:
            factors = {part: getattr(layer, part) for part in Kronecker.parts}
            delta = Kronecker.from_tensors({n: one[adapter_name] for n, one in factors.items() if adapter_name in one})
        found[name.replace(".base_layer", "")] = delta.scaled(layer.scaling[adapter_name])
    return found
