"""The OFT adapter: rotations of layers' inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from lightning_modules.adapters.factored import Factored
from lightning_modules.adapters.rotation import Rotation, elements


class OFT(Factored):
    """Rotations of linear layers' inputs, block by block, which start as none (OFTv2, arXiv 2506.19847).

    Args:
        block_size: how many inputs turn together; it divides those of each layer.
        updates: of `LinearUpdates`.
    """

    kind = "OFT"
    turns_inputs = True

    def __init__(self, block_size: int, **updates: Any) -> None:
        super().__init__(**updates)
        self.block_size = block_size

    def check_targets(self, linears: Mapping[str, nn.Linear]) -> None:
        for name, layer in linears.items():
            if layer.in_features % self.block_size:
                divisors = [side for side in range(2, self.block_size + 1) if layer.in_features % side == 0]
                raise UserError(
                    f"adapter.block_size={self.block_size} does not divide the {layer.in_features} inputs of {name}; "
                    f"{divisors[-1] if divisors else layer.in_features} does"
                )

    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Rotation:
        return Rotation(torch.zeros(in_features // self.block_size, elements(self.block_size)))

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"block_size": self.block_size}

    def __str__(self) -> str:
        return f"OFT of blocks of {self.block_size}"
