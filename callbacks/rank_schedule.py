"""T-LoRA's rank mask in sampling."""

import lightning.pytorch as L
from torch.utils.hooks import RemovableHandle

from lightning_modules.adapters.rank_mask import mask_forwards
from lightning_modules.edit_module import EditModule


class RankMasks(L.Callback):
    """Opens the rank gates of T-LoRAs in each sampling step; `Denoiser` opens them in training."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        sampler = pl_module.sampler
        if pl_module.rank_gates and pl_module.transformer is not None:
            self._hooks = mask_forwards(pl_module.transformer, pl_module.rank_gates, lambda *_: sampler.current_step())

    on_predict_start = on_fit_start

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
