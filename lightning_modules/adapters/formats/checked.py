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
from lightning_modules.adapters.formats.readers import readers
from lightning_modules.adapters.formats.written import FORMATS
from lightning_modules.adapters.low_rank import LowRank, probe
from lightning_modules.adapters.peft_layers import lora_layers


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
    check_with_diffusers(path, updates, pipeline_name, transformer)
    loader, masked = loader_of(pipeline_name) is not None, "rank_schedule" in file.adapter
    found = readers(FORMATS["diffusers"], names, updates, masked=masked, loader=loader)
    programs: dict[str, list[str]] = {}
    for one in found:
        if one.program != "Retouch":
            programs.setdefault(one.verdict, []).append(one.program)
    return "; ".join(f"{' and '.join(names)}: {verdict}" for verdict, names in programs.items())


def check_with_diffusers(path: Path, updates: Mapping[str, LowRank], pipeline_name: str, transformer: Any) -> None:
    """Load a file into a copy of a transformer, by the loader that the stock pipeline has.

    Args:
        updates: what the file is to do.
        pipeline_name: of diffusers.
        transformer: without an adapter, on the meta device; it stays as it is.

    Raises:
        UserError: diffusers refuses the file, leaves layers out, or makes something else of it.
    """
    copy, loader = _without_memory(transformer), loader_of(pipeline_name)
    try:
        if loader is None:
            copy.load_lora_adapter(path.parent, weight_name=path.name, prefix="transformer", adapter_name="check")
        else:
            pipeline = type("Pipeline", (Alone, loader), {})(copy)
            pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name="check")
    except Exception as error:  # whatever a loader of another library raises
        raise UserError(f"{path} is written, but diffusers' {pipeline_name} cannot load it: {reason(error)}") from error
    require_loaded(copy, "check", updates, path)


def loader_of(pipeline_name: str) -> Any:
    """The mixin by which a pipeline of diffusers loads LoRAs, known by its name; None for one that has none.

    The pipeline's own module would import the classes of its encoders, without which training on cached latents does.
    """
    from diffusers.loaders import lora_pipeline

    end = "LoraLoaderMixin"
    starts = [name.removesuffix(end) for name in vars(lora_pipeline) if name.endswith(end)]
    longest = max((start for start in starts if start and pipeline_name.startswith(start)), key=len, default=None)
    return None if longest is None else getattr(lora_pipeline, longest + end)


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
def require_loaded(transformer: nn.Module, adapter_name: str, updates: Mapping[str, LowRank], path: Path) -> None:
    """Compare the adapter that a loader has put into a transformer with the updates that it was to be.

    Raises:
        UserError: layers lack, or do something else.
    """
    layers = lora_layers(transformer, adapter_name)
    wrong = sorted(layers.keys() ^ updates.keys())
    for name in layers.keys() & updates.keys():
        layer, update = layers[name], updates[name]
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


def _rounded(update: LowRank, scale: float, dtype: torch.dtype) -> LowRank:
    """As its halves are in a transformer's dtype, the scale beside them."""
    return LowRank(update.down.to(dtype).float(), scale * (update.up / scale).to(dtype).float())
