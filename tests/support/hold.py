"""Points at which a command waits, to be killed or told to stop just there."""

import time
from pathlib import Path

import lightning.pytorch as L

from callbacks.shard_writer import ShardWriter
from callbacks.signals import stop


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


def hold_build(samples: int, marker: Path) -> None:
    """Let a cache's build wait when it has encoded some samples; the marker says that it does."""
    write = ShardWriter.write_on_batch_end

    def write_and_hold(writer, *args):
        write(writer, *args)
        if writer.encoded == samples:
            marker.touch()
            until_told()

    ShardWriter.write_on_batch_end = write_and_hold
