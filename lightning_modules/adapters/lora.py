"""The LoRA adapter: low-rank layers next to frozen ones, their initial and their trained weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.delta_adapter import DeltaAdapter
from lightning_modules.adapters.peft_layers import (
    ADAPTER,
    add_adapter,
    cast_inputs,
    full_tensor,
    get_weight,
    lora_layers,
    set_weight,
    use_weight,
)
from lightning_modules.adapters.ranks import Ranks
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile


class LoRA(DeltaAdapter):
    """Low-rank updates of a transformer's linear layers (arXiv 2106.09685), trained in float32.

    Args:
        rank, alpha, use_rslora, rank_pattern, alpha_pattern: of `Ranks`; alpha None: the rank.
        dropout: share of the inputs that the update drops in training.
        target_modules, init_from, lr_pattern, seed: of `DeltaAdapter`.
        init_lora_weights: of peft: True draws the down projection as PyTorch does, `gaussian` from a normal
            distribution of standard deviation 1 / rank; the up projection is zero.
        lora_plus_ratio: learning-rate ratio of the up to the down projections (LoRA+, arXiv 2402.12354); None: 1.

    Attributes:
        width: neighbouring rows of the down projection that are one component.
    """

    kind = "LoRA"
    is_linear = True
    width = 1

    def __init__(
        self,
        rank: int,
        alpha: float | None,
        use_rslora: bool,
        rank_pattern: Mapping[str, int] | None,
        alpha_pattern: Mapping[str, float] | None,
        dropout: float,
        target_modules: Sequence[str] | str | None,
        init_lora_weights: bool | str,
        init_from: str | None,
        lr_pattern: Mapping[str, float] | None,
        lora_plus_ratio: float | None,
        seed: int,
    ) -> None:
        if init_lora_weights not in (True, "gaussian"):
            raise UserError(f"adapter.init_lora_weights={init_lora_weights}: choose true or gaussian")
        super().__init__(target_modules, init_from, lr_pattern, seed)
        patterns = ({str(key): value for key, value in (one or {}).items()} for one in (rank_pattern, alpha_pattern))
        self.rank = rank
        self.ranks = Ranks(rank, rank if alpha is None else alpha, use_rslora, *patterns)
        self.dropout = dropout
        self.init_lora_weights = init_lora_weights
        self.lora_plus_ratio = lora_plus_ratio

    def check_targets(self, linears: Mapping[str, nn.Linear]) -> None:
        self.ranks.check({name: min(one.weight.shape) for name, one in linears.items()})

    def check_start(self, file: LoRAFile) -> None:
        super().check_start(file)
        if (file.adapter.get("rank_schedule") or {}).get("width", 1) != self.width:
            made_by = "ortho_tlora" if self.width == 1 else "lora or tlora"
            raise UserError(f"adapter.init_from={file.path} was made by adapter={made_by}: choose that")

    def put(self, transformer: nn.Module, targets: Sequence[str]) -> None:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            add_adapter(transformer, self.ranks, self.dropout, targets, self.init_lora_weights)
        for parameter in trainable(transformer).values():
            parameter.data = parameter.data.float()
        # Autocast casts the weights. A float32 copy of each input, as by peft, would be kept in 16 bits too.
        cast_inputs(transformer, False)
        self.initialize(transformer)

    def initialize(self, transformer: nn.Module) -> None:
        """Replace peft's initial layers; LoRA keeps them."""

    @torch.no_grad()
    def load(self, transformer: nn.Module, names: LayerNames) -> None:
        assert self.init_from is not None
        layers, trained = lora_layers(transformer, ADAPTER), Ranks.of_file(LoRAFile(self.init_from))
        deltas = self.read_start(layers, names, type(transformer).__name__)
        for name, layer in layers.items():
            delta, rank, own = deltas[name], self.ranks.rank_of(name), layer.scaling[ADAPTER]
            assert isinstance(delta, LowRank)
            if delta.rank != rank * self.width:
                raise UserError(
                    f"adapter.init_from={self.init_from}: {name} has rank {delta.rank // self.width}, here "
                    f"adapter.rank={rank}"
                )
            scale = own if trained is None else trained.scale_of(name)
            # In the down projection, which contains an orthogonal adapter's singular values.
            set_weight(layer.lora_A[ADAPTER], delta.down * (scale / own))
            set_weight(layer.lora_B[ADAPTER], delta.up / scale)
            self.load_magnitude(layer, delta)

    def load_magnitude(self, layer: Any, delta: LowRank) -> None:
        """Copy a DoRA's magnitude."""

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Temporarily cast the weights; the scale is in the up projections, as in the file."""
        layers = lora_layers(part, ADAPTER).values()
        scales = [layer.scaling[ADAPTER] for layer in layers]
        downs = [get_weight(layer.lora_A[ADAPTER]) for layer in layers]
        ups = [get_weight(layer.lora_B[ADAPTER]) * scale for layer, scale in zip(layers, scales, strict=True)]
        with super().in_dtype(part, dtype):
            for layer, down, up in zip(layers, downs, ups, strict=True):
                layer.scaling[ADAPTER] = 1.0
                use_weight(layer.lora_A[ADAPTER], down.to(dtype))
                use_weight(layer.lora_B[ADAPTER], up.to(dtype))
            try:
                yield
            finally:
                for layer, scale in zip(layers, scales, strict=True):
                    layer.scaling[ADAPTER] = scale
                    use_weight(layer.lora_A[ADAPTER], None)
                    use_weight(layer.lora_B[ADAPTER], None)

    @torch.no_grad()
    def deltas(self, transformer: nn.Module) -> dict[str, LowRank]:
        found = {}
        for name, layer in lora_layers(transformer, ADAPTER).items():
            halves = (full_tensor(get_weight(half[ADAPTER])) for half in (layer.lora_A, layer.lora_B))
            found[name] = LowRank(*(half.cpu().clone() for half in halves)).scaled(layer.scaling[ADAPTER])
        return found

    @property
    def has_own_rates(self) -> bool:
        return super().has_own_rates or self.lora_plus_ratio is not None

    def lr_factor(self, name: str) -> float:
        ratio = self.lora_plus_ratio if ".lora_B." in name else None
        return super().lr_factor(name) * (1.0 if ratio is None else ratio)

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        layers = len([name for name in trained if ".lora_A." in name and name.endswith(".weight")])
        count = sum(tensor.numel() for tensor in trained.values())
        return f"{self}, alpha {self.ranks.alpha:g}: {layers} layers, {count:,} parameters"

    def metadata(self) -> dict[str, Any]:
        return self.ranks.metadata() | super().metadata()

    def __str__(self) -> str:
        return f"LoRA rank {self.ranks}"
