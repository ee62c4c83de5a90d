"""T-LoRA's rank mask in every forward."""

import lightning.pytorch as L
from torch.utils.hooks import RemovableHandle

from lightning_modules.adapters.rank_mask import mask_forwards
from lightning_modules.edit_module import EditModule


class RankMasks(L.Callback):
    """Opens the rank gates of T-LoRAs: in training by each sample's t, in sampling and prediction by the step's.

    The module contributes it to each run (`EditModule.configure_callbacks`).
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(pl_module)

    def _open(self, module: L.LightningModule) -> None:
        assert isinstance(module, EditModule)
        if module.rank_gates and module.transformer is not None:
            self._hooks = mask_forwards(module.transformer, module.rank_gates, module.sampler.current_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
