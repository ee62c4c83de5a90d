"""LoRA and DoRA: low-rank layers next to frozen ones, their initial and their trained weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError
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
    used_weight,
)
from lightning_modules.adapters.targets import Ranks
from lightning_modules.blocks import compute_dtype, without_autocast
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.quantization.linear import QuantizedLinear


class LoRA(DeltaAdapter):
    """Low-rank updates of a transformer's linear layers (arXiv 2106.09685), trained in float32.

    Args:
        rank, alpha, use_rslora, rank_pattern, alpha_pattern: arguments of `Ranks`; alpha None: the rank.
        dropout: share of the inputs that the update drops in training.
        init_lora_weights: as in peft: True draws the down projection as PyTorch does, `gaussian` from a normal
            distribution of standard deviation 1 / rank; the up projection is zero.
        lora_plus_ratio: learning-rate ratio of the up to the down projections (LoRA+, arXiv 2402.12354); None: 1.
        settings: arguments of `DeltaAdapter`.

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
        init_lora_weights: bool | str,
        lora_plus_ratio: float | None,
        **settings: Any,
    ) -> None:
        if init_lora_weights not in (True, "gaussian"):
            raise UserError(f"adapter.init_lora_weights={init_lora_weights}: choose true or gaussian")
        super().__init__(**settings)
        patterns = ({str(key): value for key, value in (one or {}).items()} for one in (rank_pattern, alpha_pattern))
        self.rank = rank
        self.ranks = Ranks(rank, rank if alpha is None else alpha, use_rslora, *patterns)
        self.dropout = dropout
        self.init_lora_weights = init_lora_weights
        self.lora_plus_ratio = lora_plus_ratio
        self.has_own_rates = self.has_own_rates or lora_plus_ratio is not None

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
        for layer in lora_layers(transformer, ADAPTER).values():
            layer.register_forward_pre_hook(_cast_once)
            layer.lora_variant[ADAPTER] = InOneProduct()
        self.initialize(transformer)

    def initialize(self, transformer: nn.Module) -> None:
        """Replace peft's initial layers; LoRA keeps them."""

    def load(self, layer: Any, name: str, delta: LowRank, file: LoRAFile) -> None:
        trained, rank, own = Ranks.of_file(file), self.ranks.rank_of(name), layer.scaling[ADAPTER]
        if delta.rank != rank * self.width:
            raise UserError(
                f"adapter.init_from={file.path}: {name} has rank {delta.rank // self.width}, here adapter.rank={rank}"
            )
        scale = own if trained is None else trained.scale_of(name)
        # In the down projection, which contains an orthogonal adapter's singular values.
        set_weight(layer.lora_A[ADAPTER], delta.down * (scale / own))
        set_weight(layer.lora_B[ADAPTER], delta.up / scale)

    def layers(self, transformer: nn.Module) -> Mapping[str, Any]:
        return lora_layers(transformer, ADAPTER)

    def delta(self, layer: Any) -> LowRank:
        return LowRank(*(full_tensor(get_weight(half[ADAPTER])) for half in (layer.lora_A, layer.lora_B)))

    def use(self, layer: Any, delta: LowRank | None) -> None:
        use_weight(layer.lora_A[ADAPTER], None if delta is None else delta.down)
        use_weight(layer.lora_B[ADAPTER], None if delta is None else delta.up)

    def lr_factor(self, name: str) -> float:
        ratio = self.lora_plus_ratio if ".lora_B." in name else None
        return super().lr_factor(name) * (1.0 if ratio is None else ratio)

    def metadata(self) -> dict[str, Any]:
        return self.ranks.metadata() | super().metadata()

    def __str__(self) -> str:
        return f"{self.kind} rank {self.ranks}, alpha {self.ranks.alpha:g}"


def _cast_once(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast a layer's input to the dtype of its products, of which each would cast and keep its own."""
    return inputs[0].to(compute_dtype(inputs[0])), *inputs[1:]


class InOneProduct:
    """The variant of peft's LoRA layers that adds the update within the product that computes it."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """x (..., in) and y = W x + b (..., out) -> y + s B A x, in y's memory."""
        hidden = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        half, scale = module.lora_B[active_adapter], module.scaling[active_adapter]
        if not torch.is_grad_enabled():  # images have the bits of peft's own layers, which load the file
            return result + half(hidden) * scale
        up = used_weight(half)
        hidden, up = (hidden if scale == 1 else scale * hidden).to(result.dtype), up.to(result.dtype)
        if torch.compiler.is_compiling():
            return torch.addmm(result.flatten(0, -2), hidden.flatten(0, -2), up.t()).view(result.shape)
        return _AddProduct.apply(result, hidden, up)


class _AddProduct(torch.autograd.Function):
    """y (..., out), h (..., r), B (out, r) -> y + h B^T, in y's memory, which no backward pass reads."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, up)
        y = y.detach()  # changed in place, a view would cost copies in the backward pass
        y.view(-1, len(up)).addmm_(hidden.view(-1, up.shape[1]), up.t())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, up = ctx.saved_tensors
        rows = grad.reshape(-1, len(up))
        with without_autocast(grad.device):
            hidden_grad = (rows @ up).view(hidden.shape)
            up_grad = rows.t() @ hidden.view(-1, up.shape[1]) if ctx.needs_input_grad[2] else None
        return grad, hidden_grad, up_grad


class DoRA(LoRA):
    """A LoRA with trainable magnitudes: m (W + s B A) / ||W + s B A||, the norm without gradient.

    peft's own does not support our quantized layers, and computes the whole matrix in every step. Arguments as for
    `LoRA`; dropout is applied to A's inputs only.
    """

    kind = "DoRA"
    starts_from = ("DoRA", "LoRA")
    is_linear = False
    adds_to_outputs = False

    def initialize(self, transformer: nn.Module) -> None:
        attach_magnitudes(transformer, ADAPTER)

    def load(self, layer: Any, name: str, delta: LowRank, file: LoRAFile) -> None:
        """Copy the magnitude as well; a LoRA starts with the norms of its rows, which change nothing."""
        super().load(layer, name, delta, file)
        magnitude = row_norms(layer, ADAPTER) if delta.magnitude is None else delta.magnitude
        layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude)

    def delta(self, layer: Any) -> LowRank:
        magnitude = full_tensor(layer.lora_magnitude_vector[ADAPTER].weight.detach())
        return replace(super().delta(layer), magnitude=magnitude)


class Magnitude(nn.Module):
    """The norms m of a layer's rows, under peft's name.

    Args:
        squares: (out,), squared norms of the frozen weight's rows.
        weight: m (out,); None for the norms of the frozen weight.

    Attributes:
        squares: not a parameter, which FSDP would shard, nor a buffer, which DDP would broadcast.
    """

    def __init__(self, squares: Tensor, weight: Tensor | None = None) -> None:
        super().__init__()
        self.squares = squares
        self.weight = nn.Parameter(squares.sqrt() if weight is None else weight.to(squares))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.squares = self.squares.to(fn(self.squares).device)
        return self


def attach_magnitudes(
    transformer: nn.Module, adapter_name: str, magnitudes: Mapping[str, Tensor] | None = None
) -> None:
    """Turn a LoRA of peft into a DoRA with magnitudes by layer; None for the frozen weights' norms in all layers."""
    for name, layer in lora_layers(transformer, adapter_name).items():
        if magnitudes is not None and name not in magnitudes:
            continue
        base = layer.get_base_layer()
        weight = base.dequantize(torch.float32) if isinstance(base, QuantizedLinear) else base.weight.detach().float()
        squares = weight.square().sum(dim=1)
        given = None if magnitudes is None else magnitudes[name]
        layer.lora_magnitude_vector[adapter_name] = Magnitude(squares, given)
        layer.lora_variant[adapter_name] = WithMagnitude()
        layer.use_dora[adapter_name] = True
        if "lora_magnitude_vector" not in layer.adapter_layer_names:
            layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_magnitude_vector")


class WithMagnitude:
    """The variant of peft's LoRA layers that computes a DoRA."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """x (..., in) and y = W x + b (..., out) -> f (W x + s B A x) + b, f = m / ||W + s B A|| (out,).

        Exactly y if f is 1 and B is 0.
        """
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        update = up(down(module.lora_dropout[active_adapter](x))) * module.scaling[active_adapter]
        bias = module.get_base_layer().bias
        base = result if bias is None else result - bias.to(result.dtype)
        norms = row_norms(module, active_adapter)
        factors = module.lora_magnitude_vector[active_adapter].weight.float() / norms.where(norms > 0, 1.0)
        # The difference from 1: rounded to 16 bits, the factor itself would lose most of the learned change.
        return result + update + (factors - 1).to(result.dtype) * (base + update)


@torch.no_grad()
def row_norms(layer: Any, adapter_name: str) -> Tensor:
    """Return ||W + s B A|| of each row (out,), in float32 and without gradient (section 4.3).

    Computed as ||W||^2 + 2 s <B, W A^T> + s^2 <B, B A A^T>, row by row, without the matrix.
    """
    down, up = (half[adapter_name].weight.detach() for half in (layer.lora_A, layer.lora_B))
    with without_autocast(down.device):
        up = layer.scaling[adapter_name] * up.float()
        crossed = weight_product(layer.get_base_layer(), down).float().t()  # (out, r)
        down = down.float()
        change = (up * (2 * crossed + up @ (down @ down.t()))).sum(dim=1)
    return (layer.lora_magnitude_vector[adapter_name].squares + change).clamp_min(0).sqrt()


def weight_product(layer: Any, rows: Tensor) -> Tensor:
    """(r, in) -> rows W^T (r, out), without bias; rounding no more than the weights themselves."""
    if isinstance(layer, QuantizedLinear):
        return layer.exact_product(rows.to(layer.compute_dtype))
    weight = layer.weight.detach()
    return torch.mm(rows.to(weight.dtype), weight.t())
