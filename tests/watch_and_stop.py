"""A callback for runs in several processes: looks for what waits from batch to batch, and tells one of them to stop."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.test_waiting import Watch


class WatchAndStop(Watch):
    """Leaves rank0.json and rank1.json: each step's findings, from the end of the step before on, and the last step.

    Between the first two steps the first process makes pictures, so to speak, for longer than the others' steps wait.

    Args:
        folder: for these.
        stop_at: the step in which the second process gets SIGTERM.
    """

    def __init__(self, folder: str, stop_at: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.stop_at = stop_at

    def on_train_epoch_start(self, trainer, pl_module):
        self.begin(trainer.global_step + 1, *pl_module.parameters())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.marks.add(*batch.tensors())
        if trainer.global_rank == 1 and self.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.end()
        if trainer.global_step == 1:
            _set_pg_timeout(timedelta(seconds=4))
            time.sleep(6 * trainer.is_global_zero)
        self.begin(trainer.global_step + 1, *pl_module.parameters())

    def on_train_epoch_end(self, trainer, pl_module):
        self.end()

    def on_train_end(self, trainer, pl_module):
        left = {"last": trainer.global_step, "found": self.found}
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(left))
