"""The useful work of a training step, which is its matrix products counted once each, and the time it takes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.benchmark import Timer

from datamodules.batch import LatentBatch
from datamodules.images.framing import Size
from datamodules.sizes import Sizes
from lightning_modules.adapters.rank_mask import RankGate
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase

# Token counts of the probe: the digits of a product's row count tell which tokens it is for. Multiples of 32, to which
# some transformers pad their input; padding is not useful work.
TEXT, TARGET, CONTROL = 2**5, 2**12, 2**19
# Share of the peak of matrix products that training reaches: usual for large transformers, not measured by us.
UTILISATION = 0.4
# FLOP/s of dense bf16 products, from NVIDIA's data sheets.
CARDS = {"an RTX 4090": 165e12, "an H100": 989e12}
# A caption of usual length, for families whose prompts are not padded.
CAPTION = 80 * "x"


class Passes(NamedTuple):
    """Passes of a sample through the transformer in a step.

    Attributes:
        training: forward and backward; the activations of all are in memory together.
        forward: without gradient.
    """

    training: int = 1
    forward: int = 0


ONE = Passes()


class Tokens(NamedTuple):
    """Token counts of a sample; or a product's rows for each token of a kind, and for each sample."""

    text: int
    target: int
    control: int
    sample: int = 1

    def rows(self, each: "Tokens") -> int:
        """Return all rows of a product."""
        return sum(own * factor for own, factor in zip(self, each, strict=True))


class Product(NamedTuple):
    """A matrix product of a sample, or the two products of attention."""

    rows: Tokens  # for each token of a kind, and for the sample
    sides: tuple[int, int]  # of the weight, (in, out); of attention (width of all heads, 0)
    keys: Tokens | None  # of attention, the tokens attended to
    input_gradient: bool  # whether it is computed
    weight_gradient: bool

    def forward(self, tokens: Tokens) -> int:
        """Return the FLOPs of a sample; a multiplication and an addition are two."""
        if self.keys is not None:  # queries with keys, then weights with values
            return 4 * tokens.rows(self.rows) * tokens.rows(self.keys) * self.sides[0]
        return 2 * tokens.rows(self.rows) * self.sides[0] * self.sides[1]

    def backward(self, tokens: Tokens) -> int:
        """Return the FLOPs of its gradients, without the recomputation in attention kernels."""
        if self.keys is not None:
            return 2 * self.forward(tokens) * self.input_gradient
        return self.forward(tokens) * (self.input_gradient + self.weight_gradient)


class StepFlops:
    """A model's products, recorded once on the meta device: the work of any batch is then a sum.

    Args:
        transformer: builds the transformer on the meta device, with its adapter.
        rank_gates: returns the adapter's gates, which must be open in a forward pass.
    """

    def __init__(
        self, family: Family, transformer: Callable[[], Any], rank_gates: Callable[[], Sequence[RankGate]]
    ) -> None:
        self._family, self._transformer, self._rank_gates = family, transformer, rank_gates

    @cached_property
    def products(self) -> list[Product]:
        """The products of one sample."""
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
        """Return the FLOPs of a sample's forward pass."""
        return sum(product.forward(tokens) for product in self.products)

    def of_sample(self, tokens: Tokens) -> int:
        """Return the FLOPs of a sample, forward and backward."""
        return sum(product.forward(tokens) + product.backward(tokens) for product in self.products)

    def __call__(self, batch: LatentBatch, passes: Passes = ONE) -> int:
        """Return the FLOPs of a step, each pass counted with the samples' own prompts and the adapter."""
        tokens = Tokens(*self._family.geometry.tokens(batch))
        forward = passes.forward * self.forward(tokens) if passes.forward else 0
        return len(batch.keys) * (passes.training * self.of_sample(tokens) + forward)


class _Recorder(TorchFunctionMode):
    """A mode that records the products of one sample's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            x, weight = args[:2]
            rows = _rows(x.numel() // x.shape[-1])
            sides = (weight.shape[1], weight.shape[0])
            self.products.append(Product(rows, sides, None, x.requires_grad, weight.requires_grad))
        elif function is F.scaled_dot_product_attention:
            inputs = dict(zip(("query", "key"), args, strict=False)) | dict(kwargs)
            query, key = inputs["query"], inputs["key"]
            width = query.shape[1] * query.shape[-1]
            rows, keys = _rows(query.shape[-2]), _rows(key.shape[-2])
            self.products.append(Product(rows, (width, 0), keys, query.requires_grad or key.requires_grad, False))
        return function(*args, **kwargs)


def _rows(count: int) -> Tokens:
    """Split a row count of the probe into rows for each token of a kind, and for the sample."""
    control, rest = divmod(count, CONTROL)
    target, rest = divmod(rest, TARGET)
    text, sample = divmod(rest, TEXT)
    return Tokens(text, target, control, sample)


def empty_latents(family: Family, base: FrozenBase, size: Size, samples: int, caption: str) -> LatentBatch:
    """Build a batch without content, on the meta device."""
    (target, *controls), extras = size
    config = base.source.config()
    channels = family.geometry.channels(config)

    def empty(image: tuple[int, int]) -> Tensor:
        return torch.empty(samples, channels, *base.latent_size(*image), dtype=base.dtype, device="meta")

    prompt = {
        name: torch.empty(samples, *shape, dtype=base.dtype, device="meta")
        for name, shape in family.prompt_shapes(config, caption, controls).items()
    }
    return LatentBatch(
        [""] * samples,
        [0] * samples,
        empty(target),
        empty(target),
        [empty(one) for one in controls],
        prompt,
        {},
        torch.empty(samples, 1, target[1], target[0], dtype=torch.uint8, device="meta") if "mask" in extras else None,
        rejected_mean=empty(target) if "rejected" in extras else None,
        rejected_std=empty(target) if "rejected" in extras else None,
    )


def sample_flops(
    family: Family, base: FrozenBase, step_flops: StepFlops, passes: Passes, checkpointing: str, sizes: Sizes
) -> float:
    """Return the FLOPs of a training step with one sample, the mean over samples of these sizes.

    Args:
        passes: of the objective.
        checkpointing: the gradient checkpointing policy; all but `none` compute the forward pass again.
    """
    counts = sizes.counts()
    if checkpointing != "none":
        passes = passes._replace(forward=passes.forward + passes.training)
    flops = {size: step_flops(empty_latents(family, base, size, 1, CAPTION), passes) for size in counts}
    return sum(count * flops[size] for size, count in counts.items()) / len(sizes)


def duration(flops: float, peak: float) -> str:
    """Return how long a device with this peak (FLOP/s of matrix products) takes, in minutes or hours."""
    minutes = flops / (peak * UTILISATION) / 60
    return f"{minutes / 60:.1f} h" if minutes > 90 else f"{max(1, round(minutes))} min"


def matrix_peak(device: torch.device, side: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure the FLOP/s of a square product, as the device's peak."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / mean_seconds(lambda: a @ b, 20)


def mean_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the mean seconds of a call, after two that warm up; a GPU is waited for."""
    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()).timeit(rounds).mean
