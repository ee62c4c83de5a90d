"""Write LoRA files for any program."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from foundation.catalogue import catalogue
from foundation.errors import UserError, listing
from foundation.files import replacing
from lightning_modules.lora_files.delta import Delta, LowRank, swap_halves
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.names import LayerNames, flat
from lightning_modules.lora_files.reading import HEADER_KEY, PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME, WEIGHTS_NAME

log = logging.getLogger("retouch")

# Of the Model Metadata Standard, github.com/Stability-AI/ModelSpec.
SPEC_PREFIX = "modelspec."
# The entry by which kohya's scripts and ai-toolkit name the base; the latter's names of models are those of our YAMLs.
KOHYAS_BASE = "ss_base_model_version"
DORA_SCALE = ("dora_scale", True)
# Endings of tensors that are not rounded.
EXACT = (".alpha", ".lora_magnitude_vector", ".dora_scale")


class FileFormat(NamedTuple):
    """A program's names in LoRA files.

    Attributes:
        prefix: precedes each layer's name.
        native: whether layers have the names of the model's own code, where these differ.
        flat: whether layer names have `_` in place of `.`.
        magnitude: name of DoRA's magnitude, and whether it is a column.
        alpha: whether projections are named lora_down and lora_up, with an alpha equal to the rank: the scale is in the
            weights.
        fallback: prefix of diffusers' names for layers that cannot be joined to a native one; None: refused.
        file: the name that its programs look for; None if each LoRA has its own name.
        kinds: kinds of deltas that its programs read under these names.
    """

    prefix: str
    native: bool = False
    flat: bool = False
    magnitude: tuple[str, bool] = ("lora_magnitude_vector", False)
    alpha: bool = False
    fallback: str | None = None
    file: str | None = None
    kinds: tuple[str, ...] = ("LoRA", "DoRA", "LoKr", "LoHa")

    def key(self, part: str) -> str:
        """Return the name of a tensor of `Delta.tensors`."""
        down, up = ("lora_down", "lora_up") if self.alpha else ("lora_A", "lora_B")
        own = {"down": f"{down}.weight", "up": f"{up}.weight", "magnitude": self.magnitude[0]}
        return own.get(part, part)


LORA_FORMATS = {
    "diffusers": FileFormat("transformer.", file=WEIGHTS_NAME),
    "comfyui": FileFormat("diffusion_model.", native=True, magnitude=DORA_SCALE, fallback="transformer."),
    "kohya": FileFormat("lora_unet_", native=True, flat=True, alpha=True, magnitude=DORA_SCALE, kinds=("LoRA", "DoRA")),
    "peft": FileFormat("base_model.model.", file=PEFT_WEIGHTS_NAME, kinds=("LoRA", "DoRA")),
    "onetrainer": FileFormat("lora_transformer_", flat=True, alpha=True, magnitude=DORA_SCALE),
}


def write(
    path: Path,
    deltas: Mapping[str, Delta],
    header: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    format: str = "diffusers",
    names: LayerNames | None = None,
) -> None:
    """Write the deltas of layers to a file, atomically.

    Every scale factor is in the up projections: some loaders of diffusers refuse alpha next to the weights or drop it,
    and ComfyUI drops a header's.

    Args:
        path: the file; peft's adapter_config.json is written next to its file.
        deltas: the deltas by diffusers' names of the layers.
        dtype: the dtype of the weights, unless some exceed its range.
        format: a key of `LORA_FORMATS`.
        names: the model's layers, for native names.
    """
    tensors = encode(deltas, format, names)
    require_finite(tensors, "or resume from an earlier checkpoint by adapter.init_from=RUN/lora/step-N")
    cast = _cast(tensors, dtype)
    if bad := [key for key, tensor in cast.items() if not tensor.isfinite().all()]:
        log.warning(f"note: {listing(bad)} exceeds the range of {str(dtype)[6:]}: {path} is in float32")
        cast = _cast(tensors, torch.float32)
    save(path, cast, header)
    if path.name == PEFT_WEIGHTS_NAME:
        with replacing(path.with_name(PEFT_CONFIG_NAME)) as temporary:
            loras = {name: delta for name, delta in deltas.items() if isinstance(delta, LowRank)}
            temporary.write_text(json.dumps(_peft_settings(loras), indent=2), encoding="utf-8")


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with their names in the file, atomically; entries of header["modelspec"] are entries of the file.

    safetensors writes several entries in random order, and equal weights should be equal files.
    """
    blob = memoryview(safetensors.torch.save(dict(tensors)))
    start = 8 + int.from_bytes(blob[:8], "little")
    own = dict(header)
    if spec := own.pop("modelspec", {}):
        spec = spec | {"hash_sha256": f"0x{hashlib.sha256(blob[start:]).hexdigest()}"}
    named = {name if name == KOHYAS_BASE else SPEC_PREFIX + name: spec[name] for name in sorted(spec)}
    entries = {HEADER_KEY: json.dumps(own, sort_keys=True), **named}
    text = json.dumps({"__metadata__": entries, **json.loads(bytes(blob[8:start]))}).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(blob[start:])


def modelspec(model: str, base: str, resolution: int | None, **facts: str | None) -> dict[str, str]:
    """Return the Model Metadata Standard's entries for a LoRA of a model's YAML and a base by its public name.

    SwarmUI finds the model by the architecture (T2IModelClassSorter.cs), Forge FLUX.1 (sd_forge_lora/network.py).
    """
    known = catalogue().get(model)
    entries = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{known.architecture if known else model}/lora",
        "implementation": "diffusers",
        "resolution": f"{resolution}x{resolution}" if resolution else None,
        "usage_hint": f"Trained on {base}.",
        "license": known.plain_licence if known and known.base == base else None,
    }
    return {name: value for name, value in (entries | facts).items() if value}


def modelspec_in(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(SPEC_PREFIX): text for key, text in metadata.items() if key.startswith(SPEC_PREFIX)}


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy tensors to a dtype: safetensors refuses tensors that share memory, as in fused layers.

    An alpha keeps its dtype: bfloat16 lacks integers above 256. So do DoRA's magnitudes: they are close to the norms of
    the base's rows, and 16 bits would lose most of the difference.
    """
    dtypes = {key: tensor.dtype if key.endswith(EXACT) else dtype for key, tensor in tensors.items()}
    return {key: tensor.to("cpu", dtypes[key], copy=True).contiguous() for key, tensor in tensors.items()}


def require_finite(tensors: Mapping[str, Tensor], remedy: str) -> None:
    """Raise a UserError for diverged weights, which must not replace earlier ones; `remedy`: another fix."""
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UserError(
            f"the weights are not finite ({listing(bad)}) and are not saved; earlier files are unchanged. Lower "
            f"optimizer.lr, {remedy}"
        )


def encode(deltas: Mapping[str, Delta], format: str, names: LayerNames | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file, by their names in a format; raises UserError if it cannot hold the deltas."""
    how = LORA_FORMATS[format]
    if format == "onetrainer" and names is not None and names.readers in ("", "krea2", "z_image", "qwen21"):
        how = how._replace(prefix="transformer.", flat=False)  # its names are flat only for FLUX
    if (kind := common_kind(deltas.values())) not in how.kinds:
        others = [f"format={name}" for name, one in LORA_FORMATS.items() if kind in one.kinds]
        raise UserError(f"format={format}: a {kind} cannot be written in it. Choose {' or '.join(others)}")
    if found := [f"{name}: {delta.unwritable}" for name, delta in deltas.items() if delta.unwritable]:
        raise UserError(f"{found[0]}: no other file can hold it. rank=N writes the closest LoRA")
    rank = max((delta.divisor or 1 for delta in deltas.values()), default=1)
    native = names.native if how.native and names is not None else {}
    if format == "diffusers" and names is not None and names.saved and kind != "LoKr":
        how, native = how._replace(prefix=LORA_FORMATS["comfyui"].prefix), names.saved
    named, apart = (deltas, {}) if names is None else _as_native(deltas, names, native)
    if apart and how.fallback is None:
        raise UserError(f"format={format}: {next(iter(apart.values()))}. Choose format=comfyui or format=diffusers")
    tensors = {}
    for name, delta in named.items():
        layer = (how.fallback or "") + name if name in apart else how.prefix + (flat(name) if how.flat else name)
        for part, tensor in delta.tensors().items():
            is_column = part == "magnitude" and how.magnitude[1]
            tensors[f"{layer}.{how.key(part)}"] = tensor[:, None] if is_column else tensor
        if how.alpha:  # OneTrainer divides even whole factors by the rank of its settings
            tensors[f"{layer}.alpha"] = torch.tensor(float(delta.divisor or rank))
    return tensors


def _as_native(
    deltas: Mapping[str, Delta], names: LayerNames, native_names: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Delta], dict[str, str]]:
    """Name deltas by native names, if they have one; also return why layers cannot join a native layer."""
    found: dict[str, Delta] = {}
    joined: set[str] = set()
    apart: dict[str, str] = {}
    for native, layers in native_names.items():
        present = [layer for layer in layers if layer in deltas]
        if present:
            try:
                found[native] = _join([deltas.get(layer) for layer in layers], layers, names)
                joined.update(present)
            except ValueError as error:
                apart |= dict.fromkeys(present, str(error))
    return found | {layer: delta for layer, delta in deltas.items() if layer not in joined}, apart


def _join(parts: Sequence[Delta | None], layers: Sequence[str], names: LayerNames) -> Delta:
    """Join the deltas of the layers that a native layer concatenates; raises ValueError if it is impossible."""
    present = [part for part in parts if part is not None]
    if len(layers) == 1 and layers[0] not in names.swapped:
        return present[0]
    loras = [part for part in present if isinstance(part, LowRank)]
    magnitudes = [part.magnitude for part in loras if part.magnitude is not None]
    joined = f"{listing(list(layers))} are one layer in the model's own code"
    if len(loras) < len(present):
        raise ValueError(f"{joined}, but a {present[0].kind} here")
    if magnitudes and len(magnitudes) < len(parts):
        raise ValueError(f"{joined}, and only some have DoRA")
    if len(loras) == len(parts) and all(torch.equal(part.down, loras[0].down) for part in loras):
        down, up = loras[0].down, torch.cat([part.up for part in loras])
    else:
        down = torch.cat([part.down for part in loras])
        up = down.new_zeros(sum(names.shapes[layer].out_features for layer in layers), len(down))
        row = column = 0
        for layer, part in zip(layers, parts, strict=True):
            end = row + names.shapes[layer].out_features
            if isinstance(part, LowRank):
                up[row:end, column : column + part.rank] = part.up
                column += part.rank
            row = end
    swapped = layers[0] in names.swapped
    return LowRank(down, swap_halves(up, swapped), swap_halves(torch.cat(magnitudes), swapped) if magnitudes else None)


def _peft_settings(loras: Mapping[str, LowRank]) -> dict[str, Any]:
    """Build peft's adapter_config.json: each layer has its own rank, and a scale of 1."""
    from peft import LoraConfig

    ranks = [lora.rank for lora in loras.values()]
    rank = max(set(ranks), key=ranks.count)
    # Anchored names: for peft `proj_out` matches every layer with this ending.
    others = {f"^{re.escape(layer)}": lora.rank for layer, lora in loras.items() if lora.rank != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        rank_pattern=others,
        alpha_pattern=others,
        target_modules=f"({'|'.join(map(re.escape, loras))})",
        use_dora=any(lora.magnitude is not None for lora in loras.values()),
    ).to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
