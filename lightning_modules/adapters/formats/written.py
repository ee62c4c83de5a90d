"""LoRA files for any program: the formats, and writing them."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from datamodules.errors import UserError, listing
from datamodules.files import replacing
from lightning_modules.adapters.formats.conversion import as_native
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME, WEIGHTS_NAME
from lightning_modules.adapters.formats.lora_file import HEADER_KEY
from lightning_modules.adapters.formats.names import LayerNames, flat
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.adapters.update import Update

log = logging.getLogger("retouch")

# What the weights of a file can be written in, by the names that people give them.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


class Format(NamedTuple):
    """How a program names what is in a LoRA file.

    Attributes:
        prefix: before each layer's name.
        native: whether layers have the names of the model's own code, where these are others.
        flat: whether layers' names have `_` in place of `.`.
        halves: what the down and the up projection are called.
        magnitude: what DoRA's magnitude is called, and whether it is a column.
        alpha: whether each layer has one, its rank: everything else is in the weights.
        apart: what stands before diffusers' names of layers that cannot be joined to a native one; None: refused.
        file: the name that its programs look for; None where each LoRA has its own.
        kinds: of updates that its programs read under these names.
    """

    prefix: str
    native: bool = False
    flat: bool = False
    halves: tuple[str, str] = ("lora_A", "lora_B")
    magnitude: tuple[str, bool] = ("lora_magnitude_vector", False)
    alpha: bool = False
    apart: str | None = None
    file: str | None = None
    kinds: tuple[str, ...] = ("LoRA",)

    def key(self, part: str) -> str:
        """What a tensor of `Update.tensors` is called."""
        down, up = self.halves
        own = {"down": f"{down}.weight", "up": f"{up}.weight", "magnitude": self.magnitude[0], "oft_R": "oft_R.weight"}
        return own.get(part, part)


DOWN_UP, DORA_SCALE = ("lora_down", "lora_up"), ("dora_scale", True)
# Ends of the names of what is not rounded.
EXACT = (".alpha", ".lora_magnitude_vector", ".dora_scale")
FORMATS = {
    "diffusers": Format("transformer.", file=WEIGHTS_NAME, kinds=("LoRA", "LoKr", "LoHa", "OFT")),
    "comfyui": Format(
        "diffusion_model.", native=True, magnitude=DORA_SCALE, apart="transformer.", kinds=("LoRA", "LoKr", "LoHa")
    ),
    "kohya": Format("lora_unet_", native=True, flat=True, halves=DOWN_UP, magnitude=DORA_SCALE, alpha=True),
    "peft": Format("base_model.model.", file=PEFT_WEIGHTS_NAME),
    "onetrainer": Format(
        "lora_transformer_",
        flat=True,
        halves=DOWN_UP,
        magnitude=DORA_SCALE,
        alpha=True,
        kinds=("LoRA", "LoKr", "LoHa", "OFT"),
    ),
}


def format_of(name: str, names: LayerNames | None) -> Format:
    """Return a format of `FORMATS` as a model's programs have it: OneTrainer names FLUX's layers flat, others not."""
    how = FORMATS[name]
    dotted = name == "onetrainer" and names is not None and names.readers in ("", "z_image")
    return how._replace(prefix="transformer.", flat=False) if dotted else how


def export_dtype(name: str) -> torch.dtype:
    """A value of export.dtype; raises UserError for another."""
    if name not in DTYPES:
        raise UserError(f"export.dtype={name}: choose float32, bfloat16 or float16")
    return DTYPES[name]


def save_lora(
    updates: Mapping[str, Update],
    path: Path,
    header: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    format: str = "diffusers",
    names: LayerNames | None = None,
) -> None:
    """Write updates of layers, whole or not at all.

    Every factor is in the up projections: alpha beside the weights is refused by some loaders of diffusers and dropped
    by others, and a header's by ComfyUI.

    Args:
        updates: by diffusers' names of the layers.
        path: of the file; beside peft's comes its adapter_config.json.
        dtype: of the weights, unless some are beyond its range.
        header: what there is to say of their making.
        names: of the model's layers, for a format with native ones.

    Raises:
        UserError: a weight is not finite, or the file cannot be written.
    """
    how = format_of(format, names)
    tensors = encode(updates, how, names)
    require_finite(tensors, "or resume from an earlier saving by adapter.init_from=RUN/lora/step-N")
    cast = _cast(tensors, dtype)
    if bad := [key for key, tensor in cast.items() if not tensor.isfinite().all()]:
        log.warning(f"note: {listing(bad)} has numbers beyond the range of {str(dtype)[6:]}: {path} is in float32")
        cast = _cast(tensors, torch.float32)
    # One entry only: safetensors writes several in random order, and equal weights should be equal files.
    blob = safetensors.torch.save(cast, {HEADER_KEY: json.dumps(header, sort_keys=True)})
    with replacing(path) as temporary:
        temporary.write_bytes(blob)
    if path.name == PEFT_WEIGHTS_NAME:
        with replacing(path.with_name(PEFT_CONFIG_NAME)) as temporary:
            loras = {name: update for name, update in updates.items() if isinstance(update, LowRank)}
            temporary.write_text(json.dumps(_peft_settings(loras), indent=2), encoding="utf-8")


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies, since safetensors refuses tensors that share memory, as layers that were one do.

    An alpha stays as it is: bfloat16 has not every whole number above 256. So do DoRA's magnitudes: next to those of
    the base's rows, 16 bits would lose most of what was learned.
    """
    dtypes = {key: tensor.dtype if key.endswith(EXACT) else dtype for key, tensor in tensors.items()}
    return {key: tensor.to("cpu", dtypes[key], copy=True).contiguous() for key, tensor in tensors.items()}


def require_finite(state: Mapping[str, Tensor], remedy: str) -> None:
    """Raise a UserError for weights that have diverged: they must not take the place of earlier ones.

    Args:
        remedy: what to do instead of lowering the learning rate.
    """
    if bad := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
        raise UserError(
            f"the weights are not finite ({listing(bad)}) and are not saved; what was saved before is untouched. Lower "
            f"optimizer.lr, {remedy}"
        )


def encode(updates: Mapping[str, Update], how: Format, names: LayerNames | None = None) -> dict[str, Tensor]:
    """The tensors of a file.

    Raises:
        UserError: there is no such file of these updates.
    """
    tensors = {}
    if (kind := kind_of(updates.values())) not in how.kinds:
        others = [f"format={name}" for name, one in FORMATS.items() if kind in one.kinds]
        raise UserError(f"Retouch writes a {kind} as {' or '.join(others)} alone: choose one")
    if found := [f"{name}: {update.unwritable}" for name, update in updates.items() if update.unwritable]:
        raise UserError(
            f"{found[0]}: the file that this was read from is the only form; rank=N writes the closest LoRA"
        )
    rank = max((update.divisor or 1 for update in updates.values()), default=1)
    named, apart = as_native(updates, names) if how.native and names is not None else (updates, {})
    if apart and how.apart is None:
        raise UserError(f"{next(iter(apart.values()))}: choose format=comfyui or format=diffusers")
    for name, update in named.items():
        layer = (how.apart or "") + name if name in apart else how.prefix + (flat(name) if how.flat else name)
        for part, tensor in update.tensors().items():
            is_column = part == "magnitude" and how.magnitude[1]
            tensors[f"{layer}.{how.key(part)}"] = tensor[:, None] if is_column else tensor
        if how.alpha and update.kind != "OFT":  # OneTrainer divides whole factors, too, by the rank of its settings
            tensors[f"{layer}.alpha"] = torch.tensor(float(update.divisor or rank))
    return tensors


def _peft_settings(updates: Mapping[str, LowRank]) -> dict[str, Any]:
    """peft's adapter_config.json: each layer has its own rank, and a scale of 1."""
    from peft import LoraConfig

    ranks = [update.rank for update in updates.values()]
    rank = max(set(ranks), key=ranks.count)
    # Whole names: peft takes `proj_out` for all layers that end so.
    others = {f"^{re.escape(layer)}": update.rank for layer, update in updates.items() if update.rank != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=others,
        alpha_pattern=others,
        target_modules=f"({'|'.join(map(re.escape, updates))})",
        use_dora=any(update.magnitude is not None for update in updates.values()),
    ).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {key: getattr(value, "value", value) for key, value in plain.items()}
