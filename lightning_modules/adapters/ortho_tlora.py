"""Orthogonal T-LoRA (arXiv 2507.05964, section 4.2): components that start orthonormal, without changing the base."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.tlora import TLoRA


class OrthoHalf(nn.Module):
    """A half of y = P (m * lambda * Q x) - P0 (m * lambda0 * Q0 x), with the mask m; P0, Q0 and lambda0 are frozen.

    It computes with the matrices of an equivalent LoRA of rank 2r,

        A rows     lambda_i Q_i - lambda0_i Q0_i, lambda0_i Q0_i
        B columns  P_i,                           P_i - P0_i

    whose first and last factors are exactly zero at the start. The difference of two products would not be, and in bf16
    its rounding would drown the learned change.

    Args:
        initial: the frozen matrix: lambda0 Q0 (r, in), or P0 (out, r).
    """

    def __init__(self, initial: Tensor) -> None:
        super().__init__()
        # Not a buffer: DDP would broadcast it before each forward.
        self.initial = nn.Parameter(initial, requires_grad=False)
        # In sampling: the matrix in the base's dtype, as loaded from a file.
        self.inference_weight: Tensor | None = None

    def lora_weight(self) -> Tensor:
        """Return the matrix of the LoRA of rank 2r."""
        raise NotImplementedError

    def load_lora_weight(self, weight: Tensor) -> None:
        """Copy a matrix that `lora_weight` returned."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.lora_weight() if self.inference_weight is None else self.inference_weight)


class OrthoDown(OrthoHalf):
    """Q (r, in) and lambda (r,)."""

    def __init__(self, q: Tensor, singular_values: Tensor) -> None:
        super().__init__(singular_values[:, None] * q)
        self.weight = nn.Parameter(q)
        self.singular_values = nn.Parameter(singular_values)

    def lora_weight(self) -> Tensor:
        change = self.singular_values[:, None] * self.weight - self.initial
        return torch.stack([change, self.initial], dim=1).flatten(0, 1)

    @torch.no_grad()
    def load_lora_weight(self, weight: Tensor) -> None:
        self.initial.copy_(weight[1::2])
        now = weight[0::2] + weight[1::2]
        self.singular_values.copy_(now.norm(dim=1))
        self.weight.copy_(now / self.singular_values[:, None].clamp_min(1e-30))


class OrthoUp(OrthoHalf):
    """P (out, r)."""

    def __init__(self, p: Tensor) -> None:
        super().__init__(p.clone())
        self.weight = nn.Parameter(p)

    def lora_weight(self) -> Tensor:
        return torch.stack([self.weight, self.weight - self.initial], dim=2).flatten(1, 2)

    @torch.no_grad()
    def load_lora_weight(self, weight: Tensor) -> None:
        self.initial.copy_(weight[:, 0::2] - weight[:, 1::2])
        self.weight.copy_(weight[:, 0::2])


class OrthoTLoRA(TLoRA):
    """T-LoRA whose components start as singular vectors; its files are LoRAs of twice the rank.

    They are the last r singular triples of a random matrix with independent normal entries of standard deviation 1/r,
    the default of the paper's authors.
    """

    width = 2

    def initialize(self, transformer: nn.Module) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for name, layer in lora_layers(transformer, ADAPTER).items():
            sides = (layer.out_features, layer.in_features)
            if self.rank > min(sides):
                raise UserError(f"adapter.rank={self.rank}: {name} has {min(sides)} singular values")
            place = layer.lora_A[ADAPTER].weight.device
            if place.type == "meta" or self.init_from is not None:
                shapes = (sides[0], self.rank), (self.rank,), (self.rank, sides[1])
                p, values, q = (torch.zeros(shape, device=place) for shape in shapes)
            else:
                p, values, q = random_triples(*sides, self.rank, generator)
                values = values / self.rank
            layer.lora_A[ADAPTER] = OrthoDown(q.to(place), values.to(place))
            layer.lora_B[ADAPTER] = OrthoUp(p.to(place))
            layer.r[ADAPTER] *= self.width
            layer.lora_alpha[ADAPTER] *= self.width

    def __str__(self) -> str:
        return f"orthogonal {super().__str__()}"


def random_triples(
    out_features: int, in_features: int, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the last singular triples P (out, r), lambda (r,), Q (r, in) of a random matrix without computing it.

    Its entries are independent, N(0, 1).

    The singular vectors of such a matrix are uniform on the orthonormal frames and independent of its singular values.
    The values hardly differ from matrix to matrix: layers of one shape have those of one matrix.
    """
    p, q = (random_frame(side, rank, generator) for side in (out_features, in_features))
    return p, random_singular_values(out_features, in_features)[-rank:].clone(), q.T.contiguous()


def random_frame(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a uniform matrix (rows, columns) with orthonormal columns; without the signs, LAPACK's Q is not uniform."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=generator, device=generator.device))
    return (q * r.diagonal().sign()).contiguous()


@functools.cache
def random_singular_values(rows: int, columns: int) -> Tensor:
    """Return the singular values of a random matrix with independent entries N(0, 1), in descending order."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns), device="cpu")
    return torch.linalg.svdvals(matrix)
