"""The useful work of a training step: its matrix products, counted once each."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from datamodules.batch import LatentBatch
from lightning_modules.adapters.rank_mask import RankGate
from lightning_modules.family import Family

# Tokens of the probe: the digits of a product's rows tell what they are. Multiples of 32, to which some transformers
# pad what they get; padding is no useful work.
TEXT, TARGET, CONTROL = 2**5, 2**12, 2**19


class Passes(NamedTuple):
    """Of a sample through the transformer in a step.

    Attributes:
        training: forward and backward; what they keep for the backward pass is there together.
        forward: without gradient.
    """

    training: int = 1
    forward: int = 0


ONE = Passes()


@dataclass(frozen=True)
class Tokens:
    """How many a sample has of each kind; or of a product, how many rows for a token of each kind and for a sample."""

    text: int
    target: int
    control: int
    sample: int = 1

    def count(self, rows: "Tokens") -> int:
        """All rows of a product."""
        mine, theirs = astuple(self), astuple(rows)
        return sum(own * factor for own, factor in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Product:
    """A matrix product of a sample, or the two of an attention.

    Attributes:
        rows: how many it has for a token of each kind, and for a sample.
        sides: of its weight, (in, out). Of attention (all heads' width, 0).
        keys: of attention, the tokens that are looked at; None for others.
        input_gradient, weight_gradient: whether these are computed.
    """

    rows: Tokens
    sides: tuple[int, int]
    keys: Tokens | None
    input_gradient: bool
    weight_gradient: bool

    def forward(self, tokens: Tokens) -> int:
        """FLOPs of a sample; a multiplication and an addition are two."""
        if self.keys is not None:  # queries with keys, then weights with values
            return 4 * tokens.count(self.rows) * tokens.count(self.keys) * self.sides[0]
        return 2 * tokens.count(self.rows) * self.sides[0] * self.sides[1]

    def backward(self, tokens: Tokens) -> int:
        """FLOPs of its gradients; without what attention kernels compute again."""
        if self.keys is not None:
            return 2 * self.forward(tokens) * self.input_gradient
        return self.forward(tokens) * (self.input_gradient + self.weight_gradient)


class StepFlops:
    """A model's products by what they depend on, so that the work of any batch is a sum.

    They are found once, by a forward pass on the meta device.

    Args:
        transformer: makes the transformer on the meta device, with its adapter.
        rank_gates: gives those of the adapter, which must be open for a forward.
    """

    def __init__(
        self, family: Family, transformer: Callable[[], Any], rank_gates: Callable[[], Sequence[RankGate]]
    ) -> None:
        self._family = family
        self._transformer = transformer
        self._rank_gates = rank_gates
        self._known: dict[Tokens, int] = {}

    @cached_property
    def products(self) -> list[Product]:
        """Of one sample."""
        recorder, family, transformer = _Recorder(), self._family, self._transformer()
        channels, patch = family.geometry.channels(transformer.config), family.geometry.patch
        target, control = (
            torch.empty(1, channels, patch * side, patch * tokens // side, device="meta")
            for side, tokens in ((2**6, TARGET), (2**9, CONTROL))
        )
        controls = [] if family.condition_images.most == 0 else [control]
        shapes = family.prompt_shapes(transformer.config, "", [(16, 16)] * len(controls))
        prompt = {
            name: torch.empty(1, *((TEXT, *shape[1:]) if len(shape) > 1 else shape), device="meta")
            for name, shape in shapes.items()
        }
        for gate in self._rank_gates():
            gate.factors = torch.ones(1, gate.rows, device="meta")
        with recorder:
            family.velocity(transformer.float(), target, torch.empty(1, device="meta"), controls, prompt)
        for gate in self._rank_gates():
            gate.factors = None
        return recorder.products

    def forward(self, tokens: Tokens) -> int:
        """FLOPs of a sample."""
        return sum(product.forward(tokens) for product in self.products)

    def of_sample(self, tokens: Tokens) -> int:
        """FLOPs of a sample, forward and backward."""
        if tokens not in self._known:
            self._known[tokens] = sum(product.forward(tokens) + product.backward(tokens) for product in self.products)
        return self._known[tokens]

    def __call__(self, batch: LatentBatch, passes: Passes = ONE) -> int:
        """FLOPs of a step with this batch, each pass counted with the samples' own prompts and the adapter."""
        tokens = Tokens(*self._family.geometry.tokens(batch))
        forward = passes.forward * self.forward(tokens) if passes.forward else 0
        return len(batch.keys) * (passes.training * self.of_sample(tokens) + forward)


class _Recorder(TorchFunctionMode):
    """Notes the products of a forward pass of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            x, weight = args[:2]
            rows = _kinds(x.numel() // x.shape[-1])
            sides = (weight.shape[1], weight.shape[0])
            self.products.append(Product(rows, sides, None, x.requires_grad, weight.requires_grad))
        elif function is F.scaled_dot_product_attention:
            query, key = (kwargs.get(name, args[place] if place < len(args) else None) for place, name in _QUERY_KEY)
            width = query.shape[1] * query.shape[-1]
            rows, keys = _kinds(query.shape[-2]), _kinds(key.shape[-2])
            needed = query.requires_grad or key.requires_grad
            self.products.append(Product(rows, (width, 0), keys, needed, False))
        return function(*args, **kwargs)


_QUERY_KEY = ((0, "query"), (1, "key"))


def _kinds(rows: int) -> Tokens:
    """What so many rows of the probe are for."""
    control, rest = divmod(rows, CONTROL)
    target, rest = divmod(rest, TARGET)
    text, sample = divmod(rest, TEXT)
    return Tokens(text, target, control, sample)


def matrix_peak(device: torch.device, side: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a square product, the most that the device is seen to do."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, 20, device)


def median_seconds(run: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """The median of one call, after two that warm up."""
    taken = []
    for number in range(-2, rounds):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        if number >= 0:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
