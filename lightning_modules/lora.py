"""The LoRA adapter: inject with peft, read and write the files that diffusers and ComfyUI read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from datamodules.files import replacing

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
# Where Retouch's own facts stand in a file's header. diffusers reads other keys and leaves this one alone.
HEADER_KEY = "retouch"
# Where diffusers' own trainers keep the adapter's settings.
DIFFUSERS_KEY = "lora_adapter_metadata"
ADAPTER = "default"
# What the transformer's layers are called after: diffusers' trainers write the first, ComfyUI's the second. Both read
# both, but for models whose alpha diffusers reads under one of them only.
PREFIXES = ("transformer.", "diffusion_model.")


class LoRA:
    """Low-rank updates of a transformer's linear layers (arXiv 2106.09685), trained in float32.

    Args:
        rank: r, the width of the bottleneck.
        alpha: the update is scaled by alpha / rank; None stands for rank, a scale of 1.
        target_modules: names that layers end with, a regular expression for the whole name, or `all-linear`
            (every linear layer but the output projection).
        init_from: LoRA weights to start from (a run's folder, a weights folder or a file).
        seed: of the random half of the weights.
    """

    def __init__(
        self,
        rank: int,
        alpha: float | None,
        target_modules: Sequence[str] | str,
        init_from: str | None,
        seed: int,
    ) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise UserError(f"adapter.rank={rank}: must be a whole number from 1 on")
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.target_modules = target_modules if isinstance(target_modules, str) else list(target_modules)
        self.init_from = None if init_from is None else find_weights(init_from)
        self.seed = seed

    def inject(self, transformer: nn.Module) -> None:
        """Freeze the transformer and put trainable layers beside its targets.

        The initial weights are a function of the seed, whatever the device.

        Raises:
            UserError: target_modules matches nothing, or init_from fits another model.
        """
        from peft import LoraConfig

        transformer.requires_grad_(False)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.resolve_targets(transformer),
            init_lora_weights=True,
        )
        with torch.random.fork_rng(devices=()), torch.device("cpu"):
            torch.manual_seed(self.seed)
            transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
        for parameter in trainable(transformer).values():
            parameter.data = parameter.data.float()
        if self.init_from is not None:
            load_adapter(transformer, self.init_from, rank=self.rank, alpha=self.alpha)

    def resolve_targets(self, transformer: nn.Module) -> list[str] | str:
        """What to tell peft; raises UserError where target_modules matches no linear layer."""
        linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
        if self.target_modules == "all-linear":
            return [name for name in linear if name != "proj_out"]
        from peft import LoraConfig
        from peft.tuners.tuners_utils import check_target_module_exists

        modules = self.target_modules
        for one in [modules] if isinstance(modules, str) else [[name] for name in modules]:
            config = LoraConfig(target_modules=one)
            try:
                found = any(check_target_module_exists(config, name) for name in linear)
            except re.error as error:
                raise UserError(f"adapter.target_modules={modules} is no regular expression: {error}") from error
            if not found:
                endings = sorted({_ending(name) for name in linear})
                raise UserError(
                    f"adapter.target_modules: {one if isinstance(one, str) else one[0]} matches no linear layer of "
                    f"{type(transformer).__name__}; it has layers that end with {', '.join(endings)}"
                )
        return modules

    def metadata(self) -> dict[str, Any]:
        """What a file's header says of the adapter."""
        return {"rank": self.rank, "alpha": self.alpha, "target_modules": self.target_modules}


def _ending(name: str) -> str:
    """The part of a layer's name that repeats from block to block: `transformer_blocks.0.attn.to_q` -> `attn.to_q`."""
    parts = name.split(".")
    blocks = [i for i, part in enumerate(parts) if part.isdigit() and i < 2]
    return ".".join(parts[blocks[0] + 1 :] if blocks else parts)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights as `LAYER.lora_A.weight` and `LAYER.lora_B.weight`."""
    infix = f".{ADAPTER}."
    return {
        name.replace(infix, "."): parameter.detach()
        for name, parameter in transformer.named_parameters()
        if infix in name
    }


def save_lora(
    transformer: nn.Module, path: Path, alpha: float, header: Mapping[str, Any], prefix: str = PREFIXES[0]
) -> None:
    """Write the adapter, whole or not at all.

    Alpha stands beside the weights of each layer, as ComfyUI, kohya's tools and diffusers expect it.
    """
    state = {prefix + name: tensor.cpu().contiguous() for name, tensor in adapter_state(transformer).items()}
    layers = {name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")}
    state |= {f"{layer}.alpha": torch.tensor(float(alpha)) for layer in layers}
    # One entry only: safetensors writes several in random order, and equal weights should be equal files.
    blob = safetensors.torch.save(state, {HEADER_KEY: json.dumps(header, sort_keys=True)})
    with replacing(path) as temporary:
        temporary.write_bytes(blob)


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
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise UserError(f"LoRA weights {path}: the folder has neither {WEIGHTS_NAME} nor lora/last/{WEIGHTS_NAME}")


def read_header(path: Path) -> dict[str, Any] | None:
    """What Retouch wrote of the run into the file, or None if the file comes from elsewhere.

    Raises:
        UserError: the file is no safetensors file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is no safetensors file or is damaged: {error}") from error
    return json.loads(metadata[HEADER_KEY]) if HEADER_KEY in metadata else None


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


def load_adapter(transformer: nn.Module, path: Path, rank: int, alpha: float) -> None:
    """Copy a file's weights into an injected adapter of the same rank; a file of another alpha is rescaled.

    Alpha stands beside the weights, or in the header that diffusers writes, or is the rank.

    Raises:
        UserError: layers, rank or shapes differ.
    """
    stored = {_without_prefix(key): tensor for key, tensor in safetensors.torch.load_file(path).items()}
    with safetensors.safe_open(path, framework="pt") as file:
        diffusers_header = json.loads((file.metadata() or {}).get(DIFFUSERS_KEY, "{}"))
    default_alpha = diffusers_header.get(f"{PREFIXES[0]}lora_alpha", rank)
    alphas = {key.removesuffix(".alpha"): float(stored.pop(key)) for key in list(stored) if key.endswith(".alpha")}
    own = adapter_state(transformer)
    if stored.keys() != own.keys():
        different = sorted(stored.keys() ^ own.keys())
        raise UserError(
            f"adapter.init_from={path} adapts other layers than adapter.target_modules: {listing(different)}"
        )
    for key, parameter in own.items():
        if stored[key].shape != parameter.shape:
            raise UserError(
                f"adapter.init_from={path}: {key} is {tuple(stored[key].shape)}, here {tuple(parameter.shape)} "
                f"(adapter.rank={rank})"
            )
        layer, _, half = key.rpartition(".lora_")
        scale = alphas.get(layer, float(default_alpha)) / alpha if half == "B.weight" else 1.0
        parameter.copy_(stored[key] * scale)


@contextmanager
def in_dtype(transformer: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the adapter's weights are as a loader casts them to a base of this dtype; the originals come back."""
    originals = {parameter: parameter.data for parameter in trainable(transformer).values()}
    for parameter in originals:
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in originals.items():
            parameter.data = data
