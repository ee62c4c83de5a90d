"""Programs that read a LoRA file: ComfyUI by rules measured with 0.33, diffusers by trying its own loader."""

import re
from collections.abc import Collection, Mapping
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
from lightning_modules.lora_files.writing import DORA_SCALE, LORA_FORMATS

# Kinds of deltas that diffusers reads.
IN_DIFFUSERS = ("LoRA", "DoRA", "LoKr")
# Pipelines whose load_lora_weights reads LoKr; the load_lora_adapter of every transformer does.
LOKR_LOADERS = ("Flux2", "ZImage")
# The layers of FLUX and similar models that ComfyUI knows by diffusers' names.
COMFYUI_LAYERS = (
    *("transformer_blocks.", "single_transformer_blocks.", "x_embedder", "context_embedder", "time_text_embed."),
    *("norm_out.", "proj_out"),
)
# Layers of Qwen-Image-2.1 that ComfyUI joins, and finds in files by diffusers' names with diffusers' prefix only.
COMFYUI_JOINED = re.compile(r"\.img_mlp\.(proj|gate_layer)$")
COMFYUI_DORA = "nearly: it divides by the row norms of the base's weights, not of the updated ones"
UNTRIED = "by its names; no ComfyUI that knows FLUX.3 was measured"
FUSE = "task=export fuse=true writes a transformer that includes it"
MASKED = "it would use the full rank at every timestep; task=export rank=N writes one rank"


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
        return ("reads it" if self.reads else "does not read it") + (f": {self.note}" if self.note else "")


def readers(path: Path, format: str, names: LayerNames, pipeline_name: str, transformer: Any) -> list[Reader]:
    """Return the verdict of each program on a file.

    Args:
        format: a key of `LORA_FORMATS`.
        pipeline_name: the model's pipeline in diffusers.
        transformer: the model's transformer without an adapter, on the meta device; it stays unchanged.

    Raises:
        UserError: diffusers does not read a LoRA in its own format.
    """
    file = LoRAFile(path)
    deltas = file.read(names, pipeline_name)
    kind = common_kind(deltas.values())
    if kind in IN_DIFFUSERS:
        problem = problem_in_diffusers(path, deltas, pipeline_name, transformer, format)
        if problem and format == "diffusers" and kind != "LoKr":  # its loader needs a factor that all layers share
            raise UserError(f"{path} is written, but {problem}. Please report it")
        fix = "; use format=diffusers" if format != "diffusers" else ""
        note = problem + fix if problem else loading_call(pipeline_name, kind, format)
        diffusers = Reader("diffusers", not problem, note)
    else:
        diffusers = Reader("diffusers", False, f"it has no {kind}; {FUSE}")
    found = [in_comfyui(format, names, deltas, kind), diffusers]
    if format == "peft":
        found.append(Reader("peft", True, "PeftModel.from_pretrained(transformer, FOLDER)"))
    if "rank_schedule" in file.adapter:
        found = [one._replace(reads=False, note=MASKED) if one.reads else one for one in found]
    return found


def in_comfyui(format: str, names: LayerNames, layers: Collection[str], kind: str = "LoRA") -> Reader:
    """Return ComfyUI's verdict on a file of a format with deltas of a kind for these layers (diffusers' names)."""
    joined = names.readers == "qwen21" and any(map(COMFYUI_JOINED.search, layers))
    saved = tuple(layer for group in names.saved.values() for layer in group if kind != "LoKr")
    # It knows other layers of these models by their native names only.
    like_flux = names.readers in ("flux", "flux2", "flux3", "longcat") and not LORA_FORMATS[format].native
    known = saved if names.saved else COMFYUI_LAYERS
    problem = ""
    if format == "peft" or (names.readers, format) in (("z_image", "kohya"), ("flux3", "onetrainer")):
        problem = "it does not know these names; use format=comfyui"
    elif kind == "DoRA" and LORA_FORMATS[format].magnitude != DORA_SCALE:
        problem = f"it ignores lora_magnitude_vector, half of the DoRA; {FUSE if joined else 'use format=comfyui'}"
    elif joined and format not in ("diffusers", "onetrainer"):
        fix = FUSE if kind == "DoRA" else "use format=diffusers"
        problem = f"it ignores img_mlp.proj and img_mlp.gate_layer; {fix}"
    elif like_flux and (ignored := [layer for layer in layers if not layer.startswith(known)]):
        problem = f"it ignores {listing(ignored)} under these names; use format=comfyui"
    note = UNTRIED if names.readers == "flux3" else COMFYUI_DORA if kind == "DoRA" else ""
    return Reader("ComfyUI", not problem, problem or note)


def loading_call(pipeline_name: str, kind: str = "LoRA", format: str = "diffusers", weights: str = "...") -> str:
    """Return the code by which diffusers reads a file, named by the code `weights`."""
    if loader_of(pipeline_name, kind, format) is not None:
        return f"pipe.load_lora_weights({weights})"
    prefix = LORA_FORMATS[format].prefix.removesuffix(".")
    return f"pipe.transformer.load_lora_adapter({weights}, prefix={prefix!r}, use_safetensors=True)"


def loader_of(pipeline_name: str, kind: str = "LoRA", format: str = "diffusers") -> Any:
    """Return the mixin by which a pipeline of diffusers loads a file, found by its name; None without one.

    The pipeline's own module would import its encoders' classes, which training on cached latents never imports.
    """
    from diffusers.loaders import lora_pipeline

    end = "LoraLoaderMixin"
    starts = [name.removesuffix(end) for name in vars(lora_pipeline) if name.endswith(end)]
    longest = max((start for start in starts if start and pipeline_name.startswith(start)), key=len, default=None)
    if longest is None or format == "peft" or (kind == "LoKr" and longest not in LOKR_LOADERS):
        return None
    return getattr(lora_pipeline, longest + end)


def problem_in_diffusers(
    path: Path, deltas: Mapping[str, Delta], pipeline_name: str, transformer: Any, format: str = "diffusers"
) -> str:
    """Return why diffusers' loader does not read these deltas from a file; "" if it does. Arguments as of `readers`."""
    copy, loader = _without_memory(transformer), loader_of(pipeline_name, common_kind(deltas.values()), format)
    where: dict[str, Any] = {"weight_name": path.name, "adapter_name": "check"}
    try:
        if loader is None:
            copy.load_lora_adapter(path.parent, prefix=LORA_FORMATS[format].prefix.removesuffix("."), **where)
        else:
            type("Pipeline", (TransformerOnly, loader), {})(copy).load_lora_weights(path.parent, **where)
    except Exception as error:  # another library's loader may raise anything
        return f"diffusers' {pipeline_name} cannot load it: {reason(error)}"
    wrong = misread(copy, "check", deltas)
    return f"diffusers reads {listing(wrong)} wrongly or not at all" if wrong else ""


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
def misread(transformer: nn.Module, adapter_name: str, deltas: Mapping[str, Delta]) -> list[str]:
    """Return the layers in which a loader has put other deltas into a transformer; an update of zero is none."""
    loaded = peft_deltas(transformer, adapter_name)
    wrong = sorted(deltas.keys() - loaded.keys())
    return wrong + [name for name, one in loaded.items() if not _is_same(one, deltas.get(name, one.scaled(0)))]


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
