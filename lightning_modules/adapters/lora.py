"""The LoRA adapter: layers beside frozen ones, their start and their weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.adapter import Adapter, Training, trainable
from lightning_modules.adapters.formats.diffusers import (
    WEIGHTS_NAME,
    check_fits,
    find_weights,
    read_adapter,
    read_weights,
    save_lora,
)
from lightning_modules.adapters.peft_layers import (
    ADAPTER,
    adapter_state,
    adapter_tensors,
    add_adapter,
    cast_inputs,
    lora_layers,
    matching,
    set_weight,
)
from lightning_modules.pretrained.frozen_base import FrozenBase


class LoRA(Adapter):
    """Low-rank updates of a transformer's linear layers (arXiv 2106.09685), trained in float32.

    Args:
        rank: r, the width of the bottleneck.
        alpha: the update is scaled by alpha / rank; None stands for rank, a scale of 1.
        dropout: share of a layer's inputs that the update does not see, in training.
        target_modules: names that layers end with, a regular expression for the whole name, or `all-linear`
            (every linear layer but the output projection).
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
        target_modules: Sequence[str] | str,
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
        self.target_modules = target_modules if isinstance(target_modules, str) else list(target_modules)
        self.init_from = None if init_from is None else find_weights(init_from)
        self.seed = seed

    def check(self, base: FrozenBase, training: Training) -> None:
        if self.init_from:
            check_fits(self.init_from, base.source.meta, base.name)
        self._check_rank(base.source.meta)
        if training.optimizer is not None:
            self.check_optimizer(training.optimizer)

    def _check_rank(self, transformer: nn.Module) -> None:
        """Raise a UserError for a rank above every target's own, which would take memory and learn nothing more."""
        linears = {name: one for name, one in transformer.named_modules() if isinstance(one, nn.Linear)}
        targets = matching(self.resolve_targets(transformer), linears)
        largest = max(min(linears[name].weight.shape) for name in targets)
        if self.rank > largest:
            raise UserError(
                f"adapter.rank={self.rank}: no layer that adapter.target_modules names has a rank above {largest}"
            )

    def inject(self, transformer: nn.Module) -> None:
        """Freeze the transformer and put trainable layers beside its targets.

        The initial weights are a function of the seed, whatever the device.

        Raises:
            UserError: target_modules matches nothing, or init_from fits another model.
        """
        transformer.requires_grad_(False)
        targets = self.resolve_targets(transformer)
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
            self.load(transformer, self.init_from)

    def initialize(self, transformer: nn.Module) -> None:
        """Replace peft's initial layers; a plain LoRA keeps them."""

    def resolve_targets(self, transformer: nn.Module) -> list[str] | str:
        """What to tell peft; raises UserError where target_modules matches no linear layer."""
        linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
        if self.target_modules == "all-linear":
            return [name for name in linear if name != "proj_out"]
        modules = self.target_modules
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
        return modules

    @torch.no_grad()
    def load(self, transformer: nn.Module, path: Path) -> None:
        """Copy a file's weights into the injected adapter of the same rank; a file of another alpha is rescaled.

        Raises:
            UserError: layers, rank or shapes differ.
        """
        stored, alphas = read_weights(path)
        schedule = read_adapter(path).get("rank_schedule") or {}
        if schedule.get("width", 1) != self.width:
            made_by = "ortho_tlora" if self.width == 1 else "lora or tlora"
            raise UserError(f"adapter.init_from={path} was made by adapter={made_by}: choose that")
        own = adapter_state(transformer)
        if stored.keys() != own.keys():
            different = sorted(stored.keys() ^ own.keys())
            raise UserError(
                f"adapter.init_from={path} adapts other layers than adapter.target_modules: {listing(different)}"
            )
        for key, weight in own.items():
            if stored[key].shape != weight.shape:
                raise UserError(
                    f"adapter.init_from={path}: {key} is {tuple(stored[key].shape)}, here {tuple(weight.shape)} "
                    f"(adapter.rank={self.rank})"
                )
        for name, layer in lora_layers(transformer, ADAPTER).items():
            down, up = (stored[f"{name}.lora_{half}.weight"] for half in "AB")
            scale = alphas.get(name, down.shape[0]) / self.file_alpha
            # In the down projection: an orthogonal adapter's singular values are there.
            set_weight(layer.lora_A[ADAPTER], down.float() * scale)
            set_weight(layer.lora_B[ADAPTER], up.float())

    def check_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        """Raise a UserError for an optimizer that the adapter cannot be trained with."""

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return adapter_tensors(part)

    def export(
        self, parts: Mapping[str, nn.Module], base: FrozenBase, header: Mapping[str, Any]
    ) -> Callable[[Path], None]:
        state = {name: tensor.cpu().clone() for name, tensor in adapter_state(parts["transformer"]).items()}
        prefix = base.family_class.lora_prefix
        return lambda folder: save_lora(state, folder / WEIGHTS_NAME, self.file_alpha, header, prefix)

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        layers = len([name for name in trained if ".lora_A." in name and name.endswith(".weight")])
        count = sum(tensor.numel() for tensor in trained.values())
        return f"{self}, alpha {self.alpha:g}: {layers} layers, {count:,} parameters"

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"lora": run}

    def loading_code(self, weights: str) -> list[str]:
        return [f"pipe.load_lora_weights({weights!r})"]

    @property
    def file_alpha(self) -> float:
        """Alpha of the LoRA that a file holds, whose rank is `width` times this one's: the scale stays alpha / rank."""
        return self.alpha * self.width

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
