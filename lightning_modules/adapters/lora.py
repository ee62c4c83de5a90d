"""The LoRA adapter: layers beside frozen ones, their start and their weights."""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.adapter import Adapter, Training, trainable
from lightning_modules.adapters.formats.checked import loader_of, read_back
from lightning_modules.adapters.formats.find import WEIGHTS_NAME, find_weights
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.adapters.low_rank import LowRank, relative_change
from lightning_modules.adapters.peft_layers import (
    ADAPTER,
    adapter_state,
    adapter_tensors,
    add_adapter,
    cast_inputs,
    get_weight,
    lora_layers,
    matching,
    set_weight,
    use_weight,
)
from lightning_modules.layers import ALIKE, Layers
from lightning_modules.pretrained.frozen_base import FrozenBase

log = logging.getLogger("retouch")


class LoRA(Adapter):
    """Low-rank updates of a transformer's linear layers (arXiv 2106.09685), trained in float32.

    Args:
        rank: r, the width of the bottleneck.
        alpha: the update is scaled by alpha / rank; None stands for rank, a scale of 1.
        dropout: share of a layer's inputs that the update does not see, in training.
        target_modules: names that layers end with, a regular expression for the whole name, or `all-linear`
            (every linear layer but the family's `Layers.output` and `flattened`); None for the family's.
        init_lora_weights: peft's: True draws the down projection as PyTorch does, `gaussian` from a normal distribution
            of standard deviation 1 / rank; the up projection is zero.
        init_from: LoRA weights to start from (a run's folder, a weights folder or a file).
        seed: of the random half of the weights.

    Attributes:
        width: how many neighbouring rows of the down projection are one component.
    """

    folder = "lora"
    width = 1

    def __init__(
        self,
        rank: int,
        alpha: float | None,
        dropout: float,
        target_modules: Sequence[str] | str | None,
        init_lora_weights: bool | str,
        init_from: str | None,
        seed: int,
    ) -> None:
        if init_lora_weights not in (True, "gaussian"):
            raise UserError(f"adapter.init_lora_weights={init_lora_weights}: choose true or gaussian")
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.dropout = dropout
        self.init_lora_weights = init_lora_weights
        self.target_modules = target_modules if isinstance(target_modules, str | None) else list(target_modules)
        self.init_from = None if init_from is None else find_weights(init_from)
        self.seed = seed
        self._told_of_rounding = False

    def check(self, base: FrozenBase, training: Training) -> None:
        if self.init_from:
            LoRAFile(self.init_from).check(LayerNames.of(base), base.name)
        self._check_rank(base.source.meta, base.family_class.layers)
        if training.optimizer is not None:
            self.check_optimizer(training.optimizer)

    def _check_rank(self, transformer: nn.Module, layers: Layers) -> None:
        """Raise a UserError for a rank above every target's own, which would take memory and learn nothing more."""
        linears = {name: one for name, one in transformer.named_modules() if isinstance(one, nn.Linear)}
        largest = max(min(linears[name].weight.shape) for name in self.resolve_targets(transformer, layers))
        if self.rank > largest:
            raise UserError(
                f"adapter.rank={self.rank}: no layer that adapter.target_modules names has a rank above {largest}"
            )

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        """Freeze the transformer and put trainable layers beside its targets.

        The initial weights are a function of the seed, whatever the device.

        Raises:
            UserError: target_modules matches nothing, or init_from fits another model.
        """
        transformer.requires_grad_(False)
        if self.target_modules is None:
            self.target_modules = list(layers.targets)
        targets = self.resolve_targets(transformer, layers)
        with torch.random.fork_rng(devices=()), torch.device("cpu"):
            torch.manual_seed(self.seed)
            add_adapter(transformer, self.rank, self.alpha, self.dropout, targets, self.init_lora_weights)
        for parameter in trainable(transformer).values():
            parameter.data = parameter.data.float()
        # Autocast casts the weights. To peft's float32 copy of each input it would add one in 16 bits, to be kept.
        cast_inputs(transformer, False)
        self.initialize(transformer)
        transformer.train()
        if self.init_from is not None:
            self.load(transformer, LoRAFile(self.init_from), LayerNames(transformer, layers.native))

    def initialize(self, transformer: nn.Module) -> None:
        """Replace peft's initial layers; a plain LoRA keeps them."""

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        """The names of the layers to adapt; raises UserError where target_modules matches no linear layer."""
        linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
        if self.target_modules == "all-linear":
            left_out = (layers.output, *layers.flattened)
            return [name for name in linear if not any(fnmatchcase(name, pattern) for pattern in left_out)]
        modules = list(layers.targets) if self.target_modules is None else self.target_modules
        targets: dict[str, None] = {}
        for one in [modules] if isinstance(modules, str) else [[name] for name in modules]:
            try:
                found = matching(one, linear)
            except re.error as error:
                raise UserError(f"adapter.target_modules={modules} is no regular expression: {error}") from error
            if not found:
                endings = sorted({_ending(name) for name in linear})
                raise UserError(
                    f"adapter.target_modules: {one if isinstance(one, str) else one[0]} matches no linear layer of "
                    f"{type(transformer).__name__}; it has layers that end with {', '.join(endings)}"
                )
            targets.update(dict.fromkeys(found))
        return [name for name in linear if name in targets]

    @torch.no_grad()
    def load(self, transformer: nn.Module, file: LoRAFile, names: LayerNames) -> None:
        """Copy a file's weights into the injected adapter of the same rank; a file of another alpha is rescaled.

        Raises:
            UserError: layers, rank or shapes differ.
        """
        start = f"adapter.init_from={file.path}"
        schedule = file.adapter.get("rank_schedule") or {}
        if schedule.get("width", 1) != self.width:
            made_by = "ortho_tlora" if self.width == 1 else "lora or tlora"
            raise UserError(f"{start} was made by adapter={made_by}: choose that")
        updates = file.read(names, type(transformer).__name__)
        layers = lora_layers(transformer, ADAPTER)
        if updates.keys() != layers.keys():
            different = [name for name in names.sides if (name in updates) != (name in layers)]
            raise UserError(f"{start} adapts other layers than adapter.target_modules: {listing(different)}")
        own = self.alpha / self.rank
        scale = file.trained_scale or own
        for name, layer in layers.items():
            update = updates[name]
            if update.magnitude is not None:
                raise UserError(f"{start} is a DoRA, which Retouch does not train")
            if update.rank != self.rank * self.width:
                raise UserError(f"{start}: {name} has rank {update.rank // self.width}, here adapter.rank={self.rank}")
            # In the down projection: an orthogonal adapter's singular values are there.
            set_weight(layer.lora_A[ADAPTER], update.down * (scale / own))
            set_weight(layer.lora_B[ADAPTER], update.up / scale)

    def check_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        """Raise a UserError for an optimizer that the adapter cannot be trained with."""

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return adapter_tensors(part)

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """As of `Adapter`; the scale is in the up projections, as in the file."""
        layers = lora_layers(part, ADAPTER).values()
        scales = [layer.scaling[ADAPTER] for layer in layers]
        ups = [get_weight(layer.lora_B[ADAPTER]) * scale for layer, scale in zip(layers, scales, strict=True)]
        with super().in_dtype(part, dtype):
            for layer, up in zip(layers, ups, strict=True):
                layer.scaling[ADAPTER] = 1.0
                use_weight(layer.lora_B[ADAPTER], up.to(dtype))
            try:
                yield
            finally:
                for layer, scale in zip(layers, scales, strict=True):
                    layer.scaling[ADAPTER] = scale

    def updates(self, transformer: nn.Module) -> dict[str, LowRank]:
        """What it has learned, of each layer, in the host's memory; all processes take part."""
        weights = {name: tensor.cpu().clone() for name, tensor in adapter_state(transformer).items()}
        return {
            name: LowRank(weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"]).scaled(
                self.alpha / self.rank
            )
            for name in lora_layers(transformer, ADAPTER)
        }

    def export(
        self, parts: Mapping[str, nn.Module], base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> Callable[[Path], None]:
        updates = self.updates(parts["transformer"])
        if dtype != torch.float32 and not self._told_of_rounding:
            self._told_of_rounding = True
            change = relative_change(updates, {name: one.to(dtype) for name, one in updates.items()})
            if math.isfinite(change):
                log.info(f"export.dtype={str(dtype)[6:]}: rounding changes the update by {change:.2%}")
        return lambda folder: save_lora(updates, folder / WEIGHTS_NAME, header, dtype)

    def check_exported(self, folder: Path, base: FrozenBase) -> str:
        names = LayerNames.of(base)
        return read_back(folder / WEIGHTS_NAME, names, base.family_class.pipeline_name, base.source.meta)

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        layers = len([name for name in trained if ".lora_A." in name and name.endswith(".weight")])
        count = sum(tensor.numel() for tensor in trained.values())
        return f"{self}, alpha {self.alpha:g}: {layers} layers, {count:,} parameters"

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"lora": run}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        if loader_of(pipeline_name) is None:
            return [f"pipe.transformer.load_lora_adapter({weights!r}, prefix='transformer', use_safetensors=True)"]
        return [f"pipe.load_lora_weights({weights!r})"]

    def metadata(self) -> dict[str, Any]:
        """What a file's header says of the adapter."""
        return {"rank": self.rank, "alpha": self.alpha, "target_modules": self.target_modules}

    def __str__(self) -> str:
        return f"LoRA rank {self.rank}"


def _ending(name: str) -> str:
    """The part of a layer's name that repeats from block to block: `transformer_blocks.0.attn.to_q` -> `attn.to_q`."""
    parts = name.split(".")
    blocks = [i for i, part in enumerate(parts) if part.isdigit() and i < 2]
    return ".".join(parts[blocks[0] + 1 :] if blocks else parts)
