"""T-LoRA (arXiv 2507.05964): a LoRA whose rank follows the timestep, to learn from one image or a few."""

import functools
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundation.errors import UserError, listing
from lightning_modules.adapters.gates import RankGate
from lightning_modules.adapters.lora import LoRA
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.rank_schedule import RankSchedule
from lightning_modules.family import ALIKE, Layers

WITHOUT_SCHEDULE = "a loader that does not apply rank_schedule uses the full rank at every timestep"


class TLoRA(LoRA):
    """A LoRA whose rank follows the timestep.

    Args:
        min_rank, alpha_rank_scale, rank_schedule: arguments of `RankSchedule`.
        lora: arguments of `LoRA`.
    """

    rank_gate: RankGate

    def __init__(self, min_rank: int, alpha_rank_scale: float, rank_schedule: Any, **lora: Any) -> None:
        super().__init__(**lora)
        if self.ranks.rank_pattern:
            raise UserError("adapter.rank_pattern: a T-LoRA's schedule has one rank. Leave it out.")
        self.schedule = RankSchedule(rank_schedule, self.rank, min_rank, alpha_rank_scale)
        self.rank_gate = RankGate(self.schedule, self.width)

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        super().inject(transformer, layers)
        self.rank_gate.attach(transformer, ADAPTER)

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        targets = super().resolve_targets(transformer, layers)
        if unmaskable := [name for name in targets if any(fnmatchcase(name, one) for one in layers.flattened)]:
            raise UserError(
                f"adapter.target_modules: {listing(unmaskable)} sees the tokens of a whole batch as one row, so "
                "a T-LoRA cannot mask single samples. Leave it out."
            )
        return targets

    def metadata(self) -> dict[str, Any]:
        schedule = {**asdict(self.schedule), "width": self.width, "note": WITHOUT_SCHEDULE}
        return super().metadata() | {"rank_schedule": schedule}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        return [
            *super().loading_code(weights, pipeline_name),
            "from lightning_modules.adapters.gates import attach_rank_schedule",
            f"attach_rank_schedule(pipe, {weights!r})",
        ]

    def __str__(self) -> str:
        return f"T-LoRA rank {self.schedule.min_rank} to {self.rank} ({self.schedule.kind}), alpha {self.ranks.alpha:g}"


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

    def used_weight(self) -> Tensor:
        return self.lora_weight() if self.inference_weight is None else self.inference_weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used_weight())


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
    the default of the paper's authors. The matrix itself is never computed: its singular vectors are uniform on the
    orthonormal frames and independent of its singular values, which hardly differ from matrix to matrix. Layers of one
    shape have the values of one matrix.
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
                p, q = (torch.zeros(side, self.rank, device=place) for side in sides)
                values = torch.zeros(self.rank, device=place)
            else:
                p, q = (random_frame(side, self.rank, generator) for side in sides)
                values = random_singular_values(*sides)[-self.rank :] / self.rank
            layer.lora_A[ADAPTER] = OrthoDown(q.T.contiguous().to(place), values.to(place))
            layer.lora_B[ADAPTER] = OrthoUp(p.to(place))
            layer.r[ADAPTER] *= self.width
            layer.lora_alpha[ADAPTER] *= self.width

    def __str__(self) -> str:
        return f"orthogonal {super().__str__()}"


def random_frame(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a uniform matrix (rows, columns) with orthonormal columns; without the signs, LAPACK's Q is not uniform."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=generator, device=generator.device))
    return (q * r.diagonal().sign()).contiguous()


@functools.cache
def random_singular_values(rows: int, columns: int) -> Tensor:
    """Return the singular values of a random matrix with independent entries N(0, 1), in descending order."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns), device="cpu")
    return torch.linalg.svdvals(matrix)
