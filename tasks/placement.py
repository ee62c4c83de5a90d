"""What a task computes on: the device, and the model of a task that trains nothing."""

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from datamodules.errors import UserError

if TYPE_CHECKING:
    import torch


def place_trainer(cfg: DictConfig) -> None:
    """Make the trainer compute where model.devices.transformer says, if it is set."""
    from lightning_modules.pretrained.repository import resolve_device

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
