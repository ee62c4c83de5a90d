"""LoRA files read back by diffusers' own loader, as others will read them."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from datamodules.errors import UserError, listing
from datamodules.files import reason
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.readers import Reader, loader_of, readers
from lightning_modules.adapters.formats.written import FORMATS
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.kronecker import PARTS, Kronecker
from lightning_modules.adapters.low_rank import LowRank, probe
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.adapters.update import Update

# Kinds that diffusers reads.
IN_DIFFUSERS = ("LoRA", "LoKr")


class NotLoaded(UserError):
    """A file that diffusers refuses."""

    def __init__(self, path: Path, pipeline_name: str, why: str) -> None:
        super().__init__(f"{path} is written, but diffusers' {pipeline_name} cannot load it: {why}")
        self.why = why


def read_back(path: Path, names: LayerNames, pipeline_name: str, transformer: Any) -> str:
    """Check a file in the form for diffusers; gives what programs make of it, in words.

    Args:
        names: of the transformer's layers.
        pipeline_name, transformer: as for `check_with_diffusers`.

    Raises:
        UserError: diffusers would not load it as it is.
    """
    file = LoRAFile(path)
    updates = file.read(names, pipeline_name)
    kind = kind_of(updates.values())
    refused = ""
    if kind in IN_DIFFUSERS:
        try:
            check_with_diffusers(path, updates, pipeline_name, transformer)
        except NotLoaded as error:
            if kind == "LoRA":
                raise
            refused = error.why
    dora = any("magnitude" in update.tensors() for update in updates.values())
    masked = "rank_schedule" in file.adapter
    found = readers(FORMATS["diffusers"], names, updates, pipeline_name, dora, masked, kind)
    if refused:  # of a LoKr whose layers have no factor in common; ComfyUI needs none
        found = [Reader("diffusers", False, refused) if one.program == "diffusers" else one for one in found]
    programs: dict[str, list[str]] = {}
    for one in found:
        if one.program != "Retouch":
            programs.setdefault(one.verdict, []).append(one.program)
    return "; ".join(f"{' and '.join(names)}: {verdict}" for verdict, names in programs.items())


def check_with_diffusers(path: Path, updates: Mapping[str, Update], pipeline_name: str, transformer: Any) -> None:
    """Load a file into a copy of a transformer, by the loader that the stock pipeline has.

    Args:
        updates: what the file is to do.
        pipeline_name: of diffusers.
        transformer: without an adapter, on the meta device; it stays as it is.

    Raises:
        NotLoaded: diffusers refuses the file.
        UserError: it leaves layers out, or makes something else of it.
    """
    copy, loader = _without_memory(transformer), loader_of(pipeline_name, kind_of(updates.values()))
    try:
        if loader is None:
            copy.load_lora_adapter(path.parent, weight_name=path.name, prefix="transformer", adapter_name="check")
        else:
            pipeline = type("Pipeline", (Alone, loader), {})(copy)
            pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name="check")
    except Exception as error:  # whatever a loader of another library raises
        raise NotLoaded(path, pipeline_name, reason(error)) from error
    require_loaded(copy, "check", updates, path)


def loading_code(weights: str, pipeline_name: str, kind: str = "LoRA") -> list[str]:
    """Lines of Python that load a file in the form for diffusers into its `pipe`."""
    if kind not in IN_DIFFUSERS:
        return [
            "from lightning_modules.adapters.applied import load_adapter",
            f"load_adapter(pipe.transformer, {weights!r})",
        ]
    if loader_of(pipeline_name, kind) is None:
        return [f"pipe.transformer.load_lora_adapter({weights!r}, prefix='transformer', use_safetensors=True)"]
    return [f"pipe.load_lora_weights({weights!r})"]


class Alone:
    """What a loader of diffusers asks of its pipeline, which has nothing but a transformer."""

    components: ClassVar[dict[str, Any]] = {}
    hf_device_map = text_encoder = text_encoder_2 = None

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer


def _without_memory(transformer: Any) -> Any:
    """A transformer of zeros, all of a tensor in one number: loaders move what they load to where the weights are."""
    copy = deepcopy(transformer)
    for module in copy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return copy


@torch.no_grad()
def require_loaded(transformer: nn.Module, adapter_name: str, updates: Mapping[str, Update], path: Path) -> None:
    """Compare the adapter that a loader has put into a transformer with the updates that it was to be.

    Raises:
        UserError: layers lack, or do something else.
    """
    layers = lora_layers(transformer, adapter_name) | _lokr_layers(transformer, adapter_name)
    wrong = sorted(layers.keys() ^ updates.keys())
    for name in layers.keys() & updates.keys():
        layer, update = layers[name], updates[name]
        if not isinstance(update, LowRank):
            x = probe(layer.get_base_layer().in_features)
            loaded, expected = _lokr(layer, adapter_name).apply(x), update.apply(x)
            if not torch.allclose(loaded, expected, rtol=0, atol=0.02 * float(expected.abs().max())):
                wrong.append(name)
            continue
        down, up = (half[adapter_name].weight for half in (layer.lora_A, layer.lora_B))
        x = probe(down.shape[1])
        scale = layer.scaling[adapter_name]
        loaded = (scale * LowRank(down.float(), up.float()).apply(x.to(down.device))).cpu()
        # Where most cancels, what loaders round is much of the rest: the same rounded is right, too.
        meant = (update.apply(x), _rounded(update, scale, down.dtype).apply(x))
        same = any(torch.allclose(loaded, one, rtol=0, atol=0.02 * float(one.abs().max())) for one in meant)
        if update.magnitude is not None:
            own = layer.lora_magnitude_vector[adapter_name].weight.float().cpu()
            same = same and torch.allclose(own, update.magnitude, rtol=0.01)
        if not same or layer.use_dora.get(adapter_name, False) != (update.magnitude is not None):
            wrong.append(name)
    if wrong:
        raise UserError(f"{path} is read wrongly by diffusers: {listing(wrong)} differ from the file; please report it")


def _lokr_layers(transformer: nn.Module, adapter_name: str) -> dict[str, Any]:
    """peft's layers that hold an adapter, by name."""
    from peft.tuners.lokr import LoKrLayer

    found = {name: module for name, module in transformer.named_modules() if isinstance(module, LoKrLayer)}
    return {name: layer for name, layer in found.items() if adapter_name in layer._available_adapters}


def _lokr(layer: Any, adapter_name: str) -> Kronecker:
    """What one of them computes."""
    factors = {part: getattr(layer, part) for part in PARTS}
    own = {part: one[adapter_name].float().cpu() for part, one in factors.items() if adapter_name in one}
    return Kronecker.of(own).scaled(layer.scaling[adapter_name])


def _rounded(update: LowRank, scale: float, dtype: torch.dtype) -> LowRank:
    """As its halves are in a transformer's dtype, the scale beside them."""
    return LowRank(update.down.to(dtype).float(), scale * (update.up / scale).to(dtype).float())
