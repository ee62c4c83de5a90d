"""The device and processes of a task, and the model of a task that trains nothing."""

import os
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from datamodules.errors import UserError
from tasks.terminal import machine_count

if TYPE_CHECKING:
    import torch


def join_processes(cfg: DictConfig) -> None:
    """Set the trainer's devices and nodes to the processes of torchrun or srun; each would otherwise train alone.

    Raises:
        UserError: the settings contradict them, or a Slurm job of several tasks started only one command.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher, count = "torchrun", int(os.environ["WORLD_SIZE"])
    else:
        launcher, count = "srun", int(os.environ.get("SLURM_NTASKS", 1))
        if count > 1 and "SLURM_STEP_ID" not in os.environ:
            raise UserError(f"this Slurm job has {count} tasks, and one command was started: srun python train.py ...")
    if count == 1:
        return
    nodes = machine_count()
    devices = count // nodes
    if cfg.trainer.devices in (1, "auto") and cfg.trainer.num_nodes == 1:
        cfg.trainer.devices, cfg.trainer.num_nodes = devices, nodes
    if (cfg.trainer.devices, cfg.trainer.num_nodes) != (devices, nodes):
        raise UserError(
            f"trainer.devices={cfg.trainer.devices} trainer.num_nodes={cfg.trainer.num_nodes}: {launcher} has started "
            f"{devices} processes on each of {nodes} nodes; leave both settings out"
        )


def place_trainer(cfg: DictConfig) -> None:
    """Make the trainer use all processes, and the device of model.devices.transformer if it is set."""
    from lightning_modules.pretrained.repository import resolve_device

    join_processes(cfg)
    device = cfg.model.devices.transformer
    if resolve_device(device, "model.devices.transformer") is None:
        return
    if cfg.trainer.devices != 1:
        raise UserError(f"model.devices.transformer={device} and trainer.devices={cfg.trainer.devices}: choose one")
    kind, _, index = device.partition(":")
    cfg.trainer.accelerator = {"cuda": "gpu"}.get(kind, kind)
    cfg.trainer.devices = [int(index or 0)] if kind == "cuda" else 1


def compute_device(cfg: DictConfig) -> "torch.device":
    """Return the trainer's device, for a task that runs without one."""
    from hydra.utils import instantiate

    place_trainer(cfg)
    return instantiate(cfg.trainer, logger=False).strategy.root_device


def frozen_model(cfg: DictConfig, **more: Any) -> Any:
    """Build the model without adapter and optimizer; nothing is loaded.

    Args:
        more: arguments of Hydra's instantiate.
    """
    from hydra.utils import instantiate

    return instantiate(cfg.model, adapter=None, optimization=None, _convert_="all", **more)
