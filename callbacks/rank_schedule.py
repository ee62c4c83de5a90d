"""A histogram of the active ranks of a T-LoRA."""

import logging
from typing import TYPE_CHECKING

import lightning.pytorch as L
from PIL import Image
from torch import Size, Tensor

from callbacks.image_writer import log_image
from datamodules.pairs import PairsDataModule
from lightning_modules import flow
from lightning_modules.adapters.rank_schedule import NUM_TRAIN_TIMESTEPS, RankSchedule
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import NOT_TRAINING
from report.images import write_figure
from runs.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("retouch")

# Training timesteps in the histogram, at most.
ENOUGH = 10_000


class RankHistogram(L.Callback):
    """Compares a T-LoRA's active ranks in training with those in sampling, before the first step.

    Args:
        output_dir: the run's folder, where the histogram is active_ranks.png.
    """

    def __init__(self, output_dir: str) -> None:
        self.path = RunFolder(output_dir).active_ranks

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if pl_module.rank_gates and trainer.is_global_zero:
            with pl_module.base.timer.stage(NOT_TRAINING):
                self._draw(trainer, pl_module)

    def _draw(self, trainer: L.Trainer, module: EditModule) -> None:
        """Draw and log the ranks, of this run's own timesteps and at the most common image size."""
        data = PairsDataModule.of(trainer)
        (width, height), _ = data.training.size_counts()[0]
        tokens = module.geometry.image_tokens(module.base.latent_size(width, height))
        schedule = module.rank_gates[0].schedule
        steps = module.base.sampling_timesteps(tokens, module.sampler.sampling)
        samples = trainer.max_steps * trainer.accumulate_grad_batches * trainer.world_size * data.batch_size
        shift = module.base.dynamic_shift(tokens)
        draws, no_latent = list(range(min(samples, ENOUGH))), Size([0])
        t = flow.sample_noise(module.flow.seed, draws, no_latent, module.flow.timesteps, shift).t
        trained = schedule.active_ranks(t * NUM_TRAIN_TIMESTEPS)
        used = schedule.active_ranks(steps, steps)
        write_figure(draw_ranks(trained, used, schedule, f"{width}x{height}"), self.path)
        with Image.open(self.path) as image:
            log_image(trainer, "active ranks", image.convert("RGB"))
        log.info(
            f"active rank of {schedule.rank}: {trained.float().mean():.1f} on average in training, "
            f"{used.float().mean():.1f} in {len(steps)} sampling steps at {width}x{height}; see {self.path}"
        )


def draw_ranks(trained: Tensor, used: Tensor, schedule: RankSchedule, size: str) -> "Figure":
    """Draw a histogram of the ranks of training samples (N,) and of sampling steps (M,)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    edges = [rank - 0.5 for rank in range(schedule.rank + 2)]
    for ranks, name, style in (
        (trained, f"{len(trained):,} training samples", {"alpha": 0.4}),
        (used, f"{len(used)} sampling steps", {"histtype": "step", "linewidth": 2}),
    ):
        weights = [100 / len(ranks)] * len(ranks)
        axes.hist(ranks, edges, weights=weights, label=f"{name}, mean {ranks.float().mean():.1f}", **style)
    title = f"{schedule.kind}, rank {schedule.min_rank} to {schedule.rank}, {size}"
    axes.set(xlabel="active rank", ylabel="share, %", xlim=(-0.5, schedule.rank + 0.5), title=title)
    axes.legend()
    return figure
