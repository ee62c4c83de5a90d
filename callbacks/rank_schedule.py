"""T-LoRA's rank mask in every forward, and a picture of the ranks that a run trains and uses."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from datamodules.files import replacing
from lightning_modules import flow
from lightning_modules.adapters.rank_mask import NUM_TRAIN_TIMESTEPS, RankSchedule, mask_forwards
from lightning_modules.edit_module import EditModule
from lightning_modules.pretrained.components import ASIDE
from lightning_modules.sampling import Predictor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("retouch")

# Samples whose timesteps stand for a longer run's.
ENOUGH = 10_000


class RankMasks(L.Callback):
    """Opens the rank gates of T-LoRAs: in training by each sample's t, in sampling and prediction by the step's."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open(pl_module)

    def _open(self, module: L.LightningModule) -> None:
        assert isinstance(module, Predictor)
        if module.rank_gates and module.transformer is not None:
            self._hooks = mask_forwards(module.transformer, module.rank_gates, module.sampling_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class RankHistogram(L.Callback):
    """Before the first step of a T-LoRA: how often each rank will be active in training, and in sampling.

    Args:
        output_dir: the run's folder; the picture is active_ranks.png.
        num_inference_steps: of the sampling that is compared.
    """

    def __init__(self, output_dir: str, num_inference_steps: int) -> None:
        self.path = Path(output_dir) / "active_ranks.png"
        self.num_inference_steps = num_inference_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if pl_module.rank_gates and trainer.is_global_zero:
            with pl_module.stopwatch.stage(ASIDE):
                self._show(trainer, pl_module)

    def _show(self, trainer: L.Trainer, module: EditModule) -> None:
        """Compare the ranks of this run's own timesteps with those of sampling, at the size that most samples have."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        [((width, height), _)] = data.size_counts().most_common(1)
        shape = module.latent_size(width, height)
        schedule = module.rank_gates[0].schedule
        steps = module.sampling_timesteps(shape, self.num_inference_steps)
        samples = trainer.max_steps * trainer.accumulate_grad_batches * trainer.world_size * data.batch_size
        t = flow.draw_timesteps(module.seed, min(samples, ENOUGH), module.timesteps, module.dynamic_shift(shape))
        trained = schedule.active_ranks(t * NUM_TRAIN_TIMESTEPS)
        used = schedule.active_ranks(steps, steps)
        with replacing(self.path) as temporary:
            figure = draw_ranks(trained, used, schedule, f"{width}x{height}")
            figure.savefig(temporary, format="png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("active ranks", figure)
        log.info(
            f"active rank of {schedule.rank}: {trained.float().mean():.1f} on average in training, "
            f"{used.float().mean():.1f} in {len(steps)} sampling steps at {width}x{height}; see {self.path}"
        )


def draw_ranks(trained: Tensor, used: Tensor, schedule: RankSchedule, size: str) -> "Figure":
    """How often each rank is active: (N,) ranks of training samples, (M,) ranks of sampling steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    edges = torch.arange(schedule.rank + 2) - 0.5
    for ranks, name, style in (
        (trained, f"{len(trained):,} training samples", {"fill": True, "alpha": 0.4}),
        (used, f"{len(used)} sampling steps", {"linewidth": 2}),
    ):
        shares = torch.bincount(ranks, minlength=schedule.rank + 1) / len(ranks)
        label = f"{name}, mean {ranks.float().mean():.1f}"
        axes.stairs(100 * shares, edges, baseline=0, label=label, **style)
    title = f"{schedule.kind}, rank {schedule.min_rank} to {schedule.rank}, {size}"
    axes.set(xlabel="active rank", ylabel="share, %", xlim=(-0.5, schedule.rank + 0.5), title=title)
    axes.legend()
    return figure
