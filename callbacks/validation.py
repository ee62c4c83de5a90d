"""Validation on held-out samples: validation.csv and the loggers."""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torchmetrics import Metric

from callbacks import find_callback
from callbacks.lora_checkpoint import LoRACheckpoint
from callbacks.sample_images import Made, SampleImages
from datamodules.batch import LatentBatch
from datamodules.pairs import PairsDataModule
from datamodules.split import Split
from foundation.errors import UserError
from foundation.files import reason
from lightning_modules import flow
from lightning_modules.edit_module import EditModule
from lightning_modules.inference import inference_weights
from lightning_modules.timing import NOT_TRAINING
from report.diagnosis import diagnosis
from report.image_metrics import EditMetrics, same_image
from report.tables import ENDS, STAYING, changes, read_validation, write_rows
from runs.run_folder import RunFolder
from runs.shares import is_stopped, of_all, of_first, share
from runs.signals import stop

log = logging.getLogger("retouch")

# Number of equal bands of t, from little noise to much.
BANDS = 4
# Measurements after step 0 from which the report says whether to train longer.
FEWEST_TO_JUDGE = 3


class Validation(L.Callback):
    """Measure the loss at fixed noise, and metrics of the sample images, after each set of sample images.

    `val_loss_t0` ... `val_loss_t3` are the losses in four bands of t, means over the held-out samples; `val_loss` is
    their mean, weighted as sampling visits the bands. A sample's noise and timesteps are always the same, spread evenly
    over each band, so that only the weights change them. A metric NAME is measured against the target as NAME, against
    the source as NAME_source, and NAME_nothing is the figure of doing nothing: an edit that copies its input is close
    to the source. NAME_staying is the figure of samples whose target is their source; the others leave these out.
    `EditMetrics` compares all three at once.

    Nothing happens without held-out samples (data.val_root, data.val_count). Metrics are of the samples that
    `SampleImages` samples; losses are of all held-out samples.

    Args:
        metrics: torchmetrics' metrics or their factories, updated with (result, target), each (1, 3, H, W) in [0, 1].
            None: the loss only.
        monitor: the figure that determines which weights are kept as `best`, next to `last`; None for the default.
        default_monitor: the model's; val_loss replaces it if it is not measured.
        early_stopping: whether training ends when the figure no longer improves.
        patience: number of scheduled measurements in a row without a better figure after which it ends.
    """

    def __init__(
        self,
        output_dir: str,
        metrics: Mapping[str, Metric | Callable[[], Metric]] | None,
        monitor: str | None,
        default_monitor: str,
        early_stopping: bool,
        patience: int,
    ) -> None:
        self.path = RunFolder(output_dir).validation
        self._makers = {name: metric for name, metric in (metrics or {}).items() if metric is not None}
        self.metrics: dict[str, Metric] = {}
        self.is_specified = monitor not in (None, "loss_avg", "val_loss")
        self.directions = _directions(self._makers)
        usual = default_monitor if default_monitor in self.directions else "val_loss"
        self.monitor = usual if monitor is None or monitor == "loss_avg" else monitor
        self.patience = patience if early_stopping else math.inf
        self.stopped_early = False
        self.rows: list[dict[str, float]] = []

    @property
    def latest(self) -> dict[str, float]:
        return self.rows[-1] if self.rows else {}

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        """Raise a UserError if the monitored figure will not be measured, before weights are loaded."""
        data = PairsDataModule.of(trainer)
        sampler = find_callback(trainer, SampleImages)
        if not self.is_specified and (sampler is None or sampler.count == 0):
            self.monitor = "val_loss"
        figures = [name for name, direction in self.directions.items() if direction is not None]
        if self.monitor not in figures:
            raise UserError(
                f"monitor={self.monitor}: no such figure is measured. Choose {', '.join(figures)} or loss_avg."
            )
        needed = {f"monitor={self.monitor}": self.is_specified, "early_stopping=true": math.isfinite(self.patience)}
        for setting in [name for name, used in needed.items() if used and data.validation is None]:
            raise UserError(f"{setting} needs samples that are held out. Set data.val_count or data.val_root.")
        if math.isfinite(self.patience) and (sampler is None or not sampler.sample_every):
            raise UserError("early_stopping=true needs measurements during the run. Set sample_every, as 200.")

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        sampler = find_callback(trainer, SampleImages)
        if sampler is None or PairsDataModule.of(trainer).validation is None:
            return
        earlier = read_validation(self.path) if trainer.global_step else []  # else the rows of a run that saved nothing
        self.rows = of_first(trainer, [row for row in earlier if row["step"] <= trainer.global_step])
        for name, metric in self._makers.items() if trainer.is_global_zero else ():
            try:
                self.metrics[name] = metric if isinstance(metric, Metric) else metric()
            except OSError as error:
                raise UserError(
                    f"callbacks.validation.metrics.{name}: its weights are not at hand: {reason(error)}"
                ) from error
            # Only the first process measures: it has all images.
            self.metrics[name].distributed_available_fn = lambda: False
        if sampler.sampled_step != trainer.global_step:  # a resumed run may have been killed before it measured
            sampler.sample_if_due(trainer, pl_module, self.latest.get("step") != trainer.global_step)
        self._after_sampling(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        self._after_sampling(trainer, pl_module)

    def _after_sampling(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        sampler, step = find_callback(trainer, SampleImages), trainer.global_step
        split = PairsDataModule.of(trainer).validation
        if sampler is None or split is None:
            return
        if sampler.sampled_step != step or self.latest.get("step") == step:
            return
        with pl_module.base.timer.stage(NOT_TRAINING):
            with trainer.precision_plugin.forward_context():
                losses = self._losses(trainer, pl_module, split)
            row = {"step": step, **losses, **self._measure(sampler, pl_module)}
            if is_stopped(trainer, together=True):  # the resumed run measures all of them
                return
            self._record(trainer, pl_module, of_first(trainer, row), sampler.sample_every or 1)

    def _losses(self, trainer: L.Trainer, module: EditModule, split: Split) -> dict[str, float]:
        """Return the loss of each band, and their weighted mean."""
        data, mine = PairsDataModule.of(trainer), share(trainer, len(split))
        indices = range(len(split))[mine]
        measured: list[Tensor] = []
        with inference_weights(module), torch.no_grad():
            for index, one in zip(indices, data.one_by_one(split, mine, empty_prompt=False), strict=True):
                if is_stopped(trainer):
                    break
                module.base.timer.note_progress(f"validating {len(measured) + 1}/{len(indices)}")
                batch = module.encoder.latents(one, empty_prompt=False).to(module.base.device)
                bands = _band_losses(module, batch, (index + 0.5) / len(split))
                measured.append(torch.cat([bands, (bands * _visits(module, batch)).sum()[None]]))
        if is_stopped(trainer, together=True):
            return {}
        *means, weighted = torch.stack(of_all(trainer, measured), dim=1).mean(1).tolist()
        return {"val_loss": weighted, **{f"val_loss_t{band}": mean for band, mean in enumerate(means)}}

    def _measure(self, sampler: SampleImages, module: EditModule) -> dict[str, float]:
        """Return each metric against the target and the source, and of doing nothing; of edits, if there are some."""
        figures: dict[str, float] = {}
        results = [one for one in sampler.results if one.target is not None]
        samples = list(map(_in_unit_range, [one for one in results if one.controls] or results))
        finite = all(bool(result.isfinite().all()) for _, result, _ in samples)
        staying = [source is not None and same_image(source, target) for source, _, target in samples]
        edits = [one for one, stays in zip(samples, staying, strict=True) if not stays] or samples
        others = [one for one, stays in zip(samples, staying, strict=True) if stays and edits is not samples]
        for name, metric in self.metrics.items():
            compares_all = isinstance(metric, EditMetrics)
            for end, indices in {"": (1, 2, 0)}.items() if compares_all else {"": (1, 2), **ENDS}.items():
                chosen = samples if compares_all else others if end == STAYING else edits
                groups = [[images[index] for index in indices] for images in chosen]
                groups = [group for group in groups if all(image is not None for image in group)]
                metric.reset()
                for count, group in enumerate(groups if finite and stop.signal is None else (), start=1):
                    module.base.timer.note_progress(f"measuring {name} {count}/{len(groups)}")
                    metric.update(*group)
                measured = metric.compute() if metric.update_count else torch.tensor(math.nan)
                if isinstance(measured, dict):
                    figures |= {one: float(value) for one, value in measured.items() if value.isfinite()}
                elif groups and not compares_all:
                    figures[name + end] = float(measured)
        return figures

    def _record(self, trainer: L.Trainer, module: EditModule, row: dict[str, float], period: int) -> None:
        """Add a row, keep the best weights and stop early; in every process, as exporting split weights takes all."""
        best = self.best()
        self.rows.append(row)
        if trainer.is_global_zero:
            write_rows(self.path, [{name: f"{value:.6g}" for name, value in row.items()} for row in self.rows])
            figures = {name: value for name, value in row.items() if name != "step"}
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step)
        keeper = find_callback(trainer, LoRACheckpoint)
        reached, former = self._score(row), -math.inf if best is None else self._score(best)
        if of_first(trainer, reached > former) and keeper is not None and trainer.global_step:
            keeper.write(trainer, module, "best")
        best = self.best()
        scores = [self._score(row) for row in self._judged() if row["step"] % period == 0]  # without requested ones
        if best is not None and scores and len(scores) - 1 - scores.index(max(scores)) >= self.patience:
            trainer.should_stop = self.stopped_early = True
            if trainer.is_global_zero:
                log.info(f"early stopping after step {trainer.global_step}: {self._has_stopped_improving(best)}")

    def summary(self) -> str:
        """Return the figures before and after training in one line."""
        parts = []
        for one in changes(self.rows):
            bounds = one.bounds(4)
            more = bounds and f" ({bounds[2:]})"
            parts.append(f"{one.name} {one.before:.4g} -> {one.now:.4g}{more}")
        return "  ".join(parts)

    def _judged(self) -> list[dict[str, float]]:
        """Return the rows after step 0 in which the monitored figure has a value."""
        return [row for row in self.rows if row["step"] and math.isfinite(self._score(row))]

    def best(self) -> dict[str, float] | None:
        """Return the best row so far after step 0."""
        return max(self._judged(), key=self._score, default=None)

    def measured(self) -> dict[str, float]:
        """Return the last value of each figure."""
        return {name: value for row in self.rows for name, value in row.items() if math.isfinite(value)}

    def best_lines(self, folder: str) -> list[str]:
        """Return lines on the best weights and on the length of the run; `folder` contains `best` and `last`."""
        best, last, judged = self.best(), self.latest, self._judged()
        if best is None:
            return []
        then, now = (
            f"{self.monitor} {row.get(self.monitor, math.nan):.4g} at step {row['step']:.0f}" for row in (best, last)
        )
        nothing = best.get(f"{self.monitor}_nothing", math.nan)
        than = f" (doing nothing: {nothing:.4g})" if self._score({self.monitor: nothing}) > self._score(best) else ""
        lines = [f"best: {folder}/best, {then}{than}; {folder}/last: {now}"]
        if len(judged) >= FEWEST_TO_JUDGE:
            more = f"train longer, trainer.max_steps={2 * last['step']:.0f}"
            longer = f"{self.monitor} still improves at step {last['step']:.0f}: {more}"
            scores = [score for score in map(self._score, self.rows) if math.isfinite(score)]
            falls = [before - after for before, after in pairwise(scores)]
            if best is not judged[-1]:
                lines.append(self._has_stopped_improving(best))
            elif scores[-1] - max(scores[:-1]) > max(*falls, (max(scores) - min(scores)) / 50):  # beyond the noise
                lines.append(longer)
        return lines

    def failure(self, losses: Sequence[float]) -> str | None:
        """Return a line about the failure that the run's figures show, given the losses of its steps."""
        return diagnosis(losses, self.rows, self.monitor, bool(self.directions[self.monitor]))

    def _has_stopped_improving(self, best: Mapping[str, float]) -> str:
        return f"{self.monitor} has not improved since step {best['step']:.0f}: use `best`, which is from there"

    def _score(self, row: Mapping[str, float]) -> float:
        """Return the monitored figure, negated if less is better; -inf if it is not finite."""
        value = row.get(self.monitor, math.nan)
        return -math.inf if not math.isfinite(value) else value if self.directions[self.monitor] else -value


def _directions(metrics: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return for each figure whether more is better; None if neither more nor less is."""
    found: dict[str, bool | None] = {"val_loss": False, **{f"val_loss_t{band}": False for band in range(BANDS)}}
    for name, metric in metrics.items():
        kind = getattr(metric, "func", metric)
        if isinstance(metric, EditMetrics):
            found |= metric.directions
        else:
            found |= dict.fromkeys([name + end for end in ("", *ENDS)], bool(kind.higher_is_better))
    return found


def _band_losses(module: EditModule, batch: LatentBatch, place: float) -> Tensor:
    """Return the loss (BANDS,) of one sample in each band, at this share of the band's width, with noise by its key."""
    seed = int.from_bytes(hashlib.sha256(batch.keys[0].encode()).digest()[:4])
    noise = torch.randn(batch.known_target.shape, generator=torch.Generator().manual_seed(seed))
    losses = []
    for band in range(BANDS):
        t = torch.tensor([(band + place) / BANDS])
        drawn = flow.Noise(t, noise, torch.zeros_like(noise))
        noised = module.flow.noised_by(batch, drawn)
        velocity = module.denoise(*noised.inputs)
        loss = flow.flow_loss(velocity, noised.velocity, batch.mask)
        losses.append(loss if batch.weights is None else loss * batch.weights)
    return torch.cat(losses).cpu()


def _visits(module: EditModule, batch: LatentBatch) -> Tensor:
    """Return the share (BANDS,) of the steps of sampling that are in each band of t, for a batch of this size."""
    tokens = module.geometry.target_tokens(batch)
    t = module.base.sampling_timesteps(tokens, module.sampler.sampling) / 1000
    return torch.bincount((t * BANDS).long().clamp_max(BANDS - 1), minlength=BANDS) / len(t)


def _in_unit_range(made: Made) -> tuple[Any, Tensor, Tensor]:
    """Return source or None, result and target, each (1, 3, H, W) in [0, 1]; transparent parts are white."""
    assert made.target is not None
    source, sides = None, made.target.shape[-2:]
    if made.controls:
        control = made.controls[0].float()
        source = torch.nn.functional.interpolate(control, sides, mode="bilinear", antialias=True)
    images = source, made.result.float(), made.target.float()
    in_range = [None if one is None else _on_white((one / 2 + 0.5).clamp(0, 1)) for one in images]
    return tuple(in_range)  # type: ignore[return-value]


def _on_white(image: Tensor) -> Tensor:
    """(1, 3 or 4, H, W) in [0, 1] -> (1, 3, H, W)."""
    colours, alpha = image[:, :3], image[:, 3:]
    return torch.lerp(torch.ones_like(colours), colours, alpha) if alpha.numel() else colours
