"""Points at which a command waits, to be killed or told to stop just there."""

import os
import time
from pathlib import Path

import lightning.pytorch as L

from callbacks import shard_writer
from callbacks.shard_writer import ShardWriter
from runs.signals import stop


def until_told() -> None:
    while stop.signal is None:
        time.sleep(0.01)


class Hold(L.Callback):
    """Waits after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step:
            until_told()


def hold_build(samples: int, marker: Path, shard_size: int = 2**29) -> None:
    """Make a cache's build wait after some samples, -1 for never, until a signal comes or MARKER.go exists.

    The marker exists while it waits; MARKER.encoded grows by a byte with each encoded sample.
    """
    shard_writer.SHARD_SIZE = shard_size
    write = ShardWriter.write_on_batch_end

    def write_and_hold(writer, *args):
        write(writer, *args)
        with marker.with_suffix(".encoded").open("a") as file:
            file.write("x")
        if writer.encoded == samples:
            marker.touch()
            while stop.signal is None and not marker.with_suffix(".go").exists():
                time.sleep(0.01)

    ShardWriter.write_on_batch_end = write_and_hold


class HoldOnce(L.Callback):
    """Waits after an optimizer step, in the first of several processes that come there.

    Args:
        marker: a file that says which process does, or did.
    """

    def __init__(self, step: int, marker: str) -> None:
        self.step = step
        self.marker = Path(marker)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step and trainer.is_global_zero and not self.marker.exists():
            self.marker.write_text(str(os.getpid()))
            until_told()
