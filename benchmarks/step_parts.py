"""Measure the parts of train.py's steps: data, forward, backward, optimizer and framework.

    python benchmarks/step_parts.py
    python benchmarks/step_parts.py model=flux_kontext data.root=my_pairs trainer.max_steps=100

It runs train.py in this process on drawn images, or with other overrides. `optimizer` includes clipping, zeroing and
the scheduler. On a GPU this is CPU time, since a step's work is only queued. Medians over the steps after 30.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import train
from benchmarks.training_speed import make_data
from lightning_modules.edit_module import EditModule
from lightning_modules.objectives.flow_matching import FlowMatchingObjective

WARM_UP = 30


class Parts:
    """Seconds by part, of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def time(self, owner: Any, method: str, part: str) -> None:
        """Count a method's time."""
        own: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - start

        setattr(owner, method, timed)

    def step(self, owner: Any, method: str) -> None:
        """Measure the time of a method in each step."""
        self.time(owner, method, "step")
        timed: Callable[..., Any] = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._now.clear()
            result = timed(*args, **kwargs)
            self.steps.append(dict(self._now))
            return result

        setattr(owner, method, counted)


def main() -> None:
    parts = Parts()
    parts.time(_PrefetchDataFetcher, "__next__", "data")
    parts.time(FlowMatchingObjective, "losses", "forward")
    parts.time(torch.autograd, "backward", "backward")
    parts.time(EditModule, "configure_gradient_clipping", "optimizer")
    parts.time(EditModule, "optimizer_zero_grad", "optimizer")
    parts.time(import_module("torch.optim.adam"), "adam", "optimizer")
    parts.time(_TrainingEpochLoop, "update_lr_schedulers", "optimizer")
    parts.step(_TrainingEpochLoop, "advance")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        drawn = [
            "model=embedded",
            f"data.root={make_data(folder / 'data', 64)}",
            "trainer.max_steps=300",
            f"data.cache_dir={folder}/cache",
        ]
        quiet = [f"output_dir={folder / 'run'}", "callbacks.sample_images=null", "save_every=0"]
        sys.argv[1:] = [*(sys.argv[1:] or drawn), *quiet]
        train.main()
    names = ("step", "data", "forward", "backward", "optimizer")
    taken = {name: [step.get(name, 0.0) for step in parts.steps[WARM_UP:]] for name in names}
    added = [whole - sum(each) for whole, *each in zip(*taken.values(), strict=True)]
    for name, seconds in {**taken, "framework": added}.items():
        print(f"{name:10} {1000 * median(seconds):9.3f} ms")


if __name__ == "__main__":
    main()
