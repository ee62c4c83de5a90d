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
    """Waits after an optimizer step; if there is a marker, only in the process that writes its id there first."""

    def __init__(self, step: int, marker: str | None = None) -> None:
        self.step = step
        self.marker = None if marker is None else Path(marker)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step != self.step:
            return
        if self.marker is not None:
            if not trainer.is_global_zero or self.marker.exists():
                return
            self.marker.write_text(str(os.getpid()))
        until_told()


def hold_build(samples: int, marker: Path, shard_size: int = 2**29) -> None:
    """Make a cache's build wait after some samples, -1 for never, until a signal comes or MARKER.go exists.

    The marker exists while it waits; MARKER.encoded grows by a byte with each encoded sample.
    """
    shard_writer.SHARD_SIZE = shard_size
    write = ShardWriter.on_predict_batch_end

    def write_and_hold(writer, *args):
        write(writer, *args)
        with marker.with_suffix(".encoded").open("a") as file:
            file.write("x")
        if writer.encoded == samples:
            marker.touch()
            while stop.signal is None and not marker.with_suffix(".go").exists():
                time.sleep(0.01)

    ShardWriter.on_predict_batch_end = write_and_hold
