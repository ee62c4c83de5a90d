"""What a task computes on: the device, and the model of a task that trains nothing."""

import os
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from datamodules.errors import UserError
from tasks.terminal import machine_count

if TYPE_CHECKING:
    import lightning.pytorch as L
    import torch


def join_processes(cfg: DictConfig) -> None:
    """Let the trainer count the processes that torchrun or srun has started, each of which would else train alone.

    Raises:
        UserError: the settings name other numbers, or a Slurm job of several tasks starts only one of them.
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


class Processes:
    """The processes of this command, each of which computes by itself.

    Args:
        trainer: for all of them.

    Attributes:
        count: how many there are.
        local_count: on this machine.
    """

    def __init__(self, trainer: "L.Trainer") -> None:
        self.launcher: Any = trainer.strategy.launcher
        self.count, self.local_count = trainer.world_size, trainer.num_devices
        self._device = trainer.strategy.root_device

    def signal(self, number: int) -> None:
        """Pass a signal on to those that this one has started."""
        if self.launcher is not None:
            self.launcher.kill(number)

    def alone(self) -> dict[str, Any]:
        """The settings of a trainer for this process alone, on its own device."""
        from lightning.pytorch.plugins.environments import LightningEnvironment

        devices = [self._device.index] if self._device.type == "cuda" else 1
        return {"strategy": "auto", "devices": devices, "num_nodes": 1, "plugins": [LightningEnvironment()]}


def start_processes(cfg: DictConfig) -> Processes:
    """Have Lightning start the other processes of this command, unless torchrun or srun has."""
    from hydra.utils import instantiate

    join_processes(cfg)
    strategy = cfg.trainer.strategy if isinstance(cfg.trainer.strategy, str) else "ddp"
    processes = Processes(instantiate(cfg.trainer, strategy=strategy, logger=False, profiler=None))
    if processes.launcher is not None:
        processes.launcher.launch(lambda: None)
    return processes


def place_trainer(cfg: DictConfig) -> None:
    """Make the trainer compute in all processes, and where model.devices.transformer says, if it is set."""
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
    """Where the trainer would compute, for a task that runs without one."""
    from hydra.utils import instantiate

    place_trainer(cfg)
    return instantiate(cfg.trainer, logger=False).strategy.root_device


def frozen_model(cfg: DictConfig, **more: Any) -> Any:
    """The model without what trains; nothing is loaded.

    Args:
        more: of Hydra's instantiate.
    """
    from hydra.utils import instantiate

    return instantiate(cfg.model, adapter=None, optimizer=None, scheduler=None, _convert_="all", **more)
