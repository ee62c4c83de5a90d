"""The files that diffusers and ComfyUI read: written, found and compared with a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from datamodules.files import reading, replacing

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
# Where Retouch's own facts stand in a file's header. diffusers reads other keys and leaves this one alone.
HEADER_KEY = "retouch"
# Where diffusers' own trainers keep the adapter's settings.
DIFFUSERS_KEY = "lora_adapter_metadata"
# What the transformer's layers are called after: diffusers' trainers write the first, ComfyUI's the second. Both read
# both, but for models whose alpha diffusers reads under one of them only.
PREFIXES = ("transformer.", "diffusion_model.")


def save_lora(
    state: Mapping[str, Tensor], path: Path, alpha: float, header: Mapping[str, Any], prefix: str = PREFIXES[0]
) -> None:
    """Write an adapter's weights, whole or not at all.

    Alpha stands beside the weights of each layer, as ComfyUI, kohya's tools and diffusers expect it.

    Raises:
        UserError: a weight is not finite, or the file cannot be written.
    """
    require_finite(state, "or resume from an earlier saving by adapter.init_from=RUN/lora/step-N")
    state = {prefix + name: tensor.cpu().contiguous() for name, tensor in state.items()}
    layers = {name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")}
    state |= {f"{layer}.alpha": torch.tensor(float(alpha)) for layer in layers}
    # One entry only: safetensors writes several in random order, and equal weights should be equal files.
    blob = safetensors.torch.save(state, {HEADER_KEY: json.dumps(header, sort_keys=True)})
    with replacing(path) as temporary:
        temporary.write_bytes(blob)


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


def find_weights(lora: str | Path) -> Path:
    """The weights file of a run's folder, a weights folder, or the file itself.

    Raises:
        UserError: there is none.
    """
    path = Path(lora).expanduser()
    candidates = [path, path / WEIGHTS_NAME, path / "lora" / "last" / WEIGHTS_NAME]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if not path.exists():
        raise UserError(f"LoRA weights {path}: no such file or folder")
    if (path / "sweep.csv").is_file():
        raise UserError(f"LoRA weights {path}: this is a sweep; name one of its jobs, such as {path / '0'}")
    if (path / "model" / "last").is_dir():
        raise UserError(
            f"LoRA weights {path}: this run trained all weights: in place of lora= pass model=NAME "
            f"model.pretrained_model_name_or_path={path / 'model' / 'last'}"
        )
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise UserError(f"LoRA weights {path}: the folder has neither {WEIGHTS_NAME} nor lora/last/{WEIGHTS_NAME}")


def read_header(path: Path) -> dict[str, Any] | None:
    """What Retouch wrote of the run into the file, or None if the file comes from elsewhere.

    Raises:
        UserError: the file is no safetensors file.
    """
    with reading(path, "name a LoRA's safetensors file, or download it again"):
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if HEADER_KEY not in metadata:
            return None
        header = json.loads(metadata[HEADER_KEY])
        if not all(isinstance(part, dict) for part in (header, header.get("adapter", {}), header.get("model", {}))):
            raise ValueError(f"its header {HEADER_KEY} is none of ours")
    return header or None


def read_adapter(path: Path) -> dict[str, Any]:
    """What the header says of the adapter; nothing in a file from elsewhere."""
    return (read_header(path) or {}).get("adapter") or {}


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`LAYER.lora_A.weight`, `LAYER.lora_B.weight`, and the layers' alphas; a layer without one has its rank's.

    Alpha stands beside the weights, or in the header that diffusers writes.
    """
    with reading(path, "download it again"):
        stored = {_without_prefix(key): tensor for key, tensor in safetensors.torch.load_file(path).items()}
        alphas = {key.removesuffix(".alpha"): float(stored.pop(key)) for key in list(stored) if key.endswith(".alpha")}
        with safetensors.safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(DIFFUSERS_KEY, "{}"))
        for_all = header.get(f"{PREFIXES[0]}lora_alpha")
    if for_all is not None:
        alphas = {key.rpartition(".lora_")[0]: float(for_all) for key in stored} | alphas
    return stored, alphas


def check_fits(path: Path, transformer: nn.Module, base: str) -> None:
    """Compare the names and shapes of a file in our format with a transformer, which may be on the meta device.

    Raises:
        UserError: the file was made for another model.
    """
    layers = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    wrong = []
    header = read_header(path) or {}
    with safetensors.safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            layer, _, half = _without_prefix(key).rpartition(".lora_")
            if half not in ("A.weight", "B.weight"):
                continue
            module = layers.get(layer)
            shape = file.get_slice(key).get_shape()
            if module is None:
                wrong.append(f"{layer} is not in the model")
            elif (shape[1] if half[0] == "A" else shape[0]) != (
                module.in_features if half[0] == "A" else module.out_features
            ):
                wrong.append(f"{layer} has another shape")
    if wrong:
        made_for = header.get("base")
        hint = f"; it was made for {made_for}" if made_for else ""
        raise UserError(f"the LoRA {path} does not fit {base}: {listing(wrong)}{hint}")


def _without_prefix(key: str) -> str:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key
