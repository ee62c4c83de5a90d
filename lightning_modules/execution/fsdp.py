"""A base that is split over several GPUs (FSDP2), for models that do not fit on one."""

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from foundation.errors import UserError
from lightning_modules.blocks import blocks


class Sharded(ModelParallelStrategy):
    """Lightning's FSDP2 strategy over all processes; checkpoints are single files without frozen parameters."""

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module: Any = self.lightning_module
        module.trained.require_same(torch.load(checkpoint_path, map_location="cpu", weights_only=True)["state_dict"])
        return super().load_checkpoint(checkpoint_path, weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(self.model, options=options)


def shard(transformer: nn.Module, mesh: Any) -> None:
    """Split a transformer by blocks, gathered while they compute; raise a UserError for layers in 4 bits."""
    for name, module in transformer.named_modules():
        if not getattr(module, "shardable", True):
            raise UserError(
                f"trainer=fsdp cannot split {name}: it splits bf16, fp8 and int8; 4 bits are small enough for "
                "trainer.strategy=ddp"
            )
    for block in blocks(transformer).values():
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)


def gather_anew(transformer: nn.Module) -> None:
    """Release weights that a forward pass without a backward pass left gathered; the next pass gathers them again."""
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
