"""Training on one sample, to see that it can be learned."""

from typing import Any

import lightning.pytorch as L

from datamodules.errors import UserError
from datamodules.pairs import PairsDataModule


class Overfit(L.Callback):
    """Leaves one sample of the data: the first."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PairsDataModule):
            raise UserError(
                "debug=overfit cannot pick a sample of streamed shards: give data.root, or a local data.shards"
            )
        data.keep_first()
