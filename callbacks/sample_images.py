"""Fixed-seed pictures of a few samples, to see the edit being learned."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor

from callbacks.best_effort import best_effort
from callbacks.image_writer import in_a_row, save_png, to_image
from callbacks.run_folder import RunFolder
from callbacks.shares import of_all, of_first, share
from datamodules.base import Example, TrainingData
from datamodules.batch import LatentBatch, RawBatch
from datamodules.files import short_name
from lightning_modules.edit_module import EditModule
from lightning_modules.family import Sampling
from lightning_modules.inference import inference_weights
from lightning_modules.picture_transformer import PictureTransformer
from lightning_modules.timing import NOT_TRAINING

# The text chunk of a strip's PNG that lists the widths of its parts.
PARTS = "parts"


class Made(NamedTuple):
    """What a strip shows, on the CPU: the controls and the target, and the result."""

    key: str
    prompt: str
    pictures: list[Tensor]
    result: Tensor


class SampleImages(L.Callback):
    """Before training, every `sample_every` steps and at the end: samples/step-N/KEY.png, control | result | target.

    The same computation as predict.py's. It draws from a generator of its own, so training is the same with and
    without it. Processes share the samples; the first one writes.

    Args:
        output_dir: the run's folder.
        sample_every: optimizer steps between two sets; 0 makes them at the end only.
        count: how many of the first samples that are held out, or where none are, of all.
        num_inference_steps, guidance_scale, true_cfg_scale, seed: as in prediction; the negative prompt is "".
        transformer_name_or_path: the transformer that makes them, of `PictureTransformer`; None for that which trains.

    Attributes:
        validation: the data module of the held-out samples, where there are some.
        results: of the last sampling, in every process.
        sampled_step: when that was.
    """

    def __init__(
        self,
        output_dir: str,
        sample_every: int,
        count: int,
        num_inference_steps: int,
        guidance_scale: float | None,
        true_cfg_scale: float | None,
        seed: int,
        transformer_name_or_path: str | None,
    ) -> None:
        self.run = RunFolder(output_dir)
        self.sample_every = sample_every
        self.count = count
        self.sampling = Sampling(num_inference_steps, guidance_scale, true_cfg_scale, "", transformer_name_or_path)
        self.seed = seed
        self._other: PictureTransformer | None = None
        self._examples: list[tuple[list[Tensor], LatentBatch]] = []  # this process's
        self._step = 0
        self.validation: TrainingData | None = None
        self.results: list[Made] = []
        self.sampled_step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, EditModule)
        pl_module.sampling_rules.check(self.sampling, pl_module.pipeline_name)
        if self.sampling.transformer_name_or_path is not None:
            self._other = PictureTransformer(pl_module, self.sampling.transformer_name_or_path)
            self._other.check()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self.validation = TrainingData.of(trainer).validation
        missing = of_first(trainer, self._step == 0 or not self._is_complete())
        self.sample_if_due(trainer, pl_module, missing)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.sample_if_due(trainer, pl_module, trainer.global_step != self._step)
        self._step = trainer.global_step

    def _is_complete(self) -> bool:
        """Whether all pictures of this step are there: a resumed run may have been killed before it made them."""
        made, first = (len(list(self.run.samples_of(step).glob("*.png"))) for step in (self._step, 0))
        return made >= first

    def sample_if_due(self, trainer: L.Trainer, pl_module: L.LightningModule, missing: bool) -> None:
        """Make the pictures of this step, if it is one that has some and they are `missing`."""
        step = trainer.global_step
        due = step in (0, trainer.max_steps) or (self.sample_every > 0 and step % self.sample_every == 0)
        if due and missing:
            assert isinstance(pl_module, EditModule)
            with pl_module.base.timer.stage(NOT_TRAINING):
                self.sample(trainer, pl_module)
            self.sampled_step = trainer.global_step

    def sample(self, trainer: L.Trainer, module: EditModule) -> None:
        """Write one strip for each of the first samples."""
        note = module.base.timer.note_progress
        if not self._examples:
            note("preparing samples")
            data = self.validation or TrainingData.of(trainer)
            guided = module.sampling_rules.negative_prompt(self.sampling) is not None
            examples = data.examples(share(trainer, self.count), empty_prompt=guided)
            self._examples = [self._prepare(module, example) for example in examples]
        made = []
        weights = inference_weights(module) if self._other is None else self._other.in_use()
        with torch.no_grad(), weights:
            for number, (pictures, latents) in enumerate(self._examples, start=1):
                note(f"sampling {number}/{len(self._examples)}")
                height, width = pictures[-1].shape[-2:]
                latents = module.encoder.refresh_prompt_embeds(latents)
                result = module.sampler.sample(latents, self.sampling, (width, height), [self.seed])
                shown = [picture.cpu() for picture in pictures]
                made.append(Made(latents.keys[0], " ".join(latents.prompts), shown, result.cpu()))
        self.results = of_all(trainer, made)
        names = file_names([one.key for one in self.results])
        if trainer.is_global_zero and self.results:
            self._write_control(min(self.results, key=lambda made: names[made.key]))
        for one in self.results if trainer.is_global_zero else ():
            with best_effort(f"sample picture of {one.key}"):
                self._write(trainer, names[one.key], one)

    def _write_control(self, made: Made) -> None:
        """Write the first control of the sample that commands name; its own file may be inside of a table or a tar."""
        if len(made.pictures) > 1 and not self.run.control.is_file():
            with best_effort(str(self.run.control)):
                save_png(to_image(made.pictures[0]), self.run.control)

    def _write(self, trainer: L.Trainer, name: str, made: Made) -> None:
        *controls, target = made.pictures
        parts = in_a_row([to_image(picture) for picture in (*controls, made.result, target)])
        strip = np.concatenate([np.asarray(part) for part in parts], axis=1)
        facts = {PARTS: " ".join(str(part.width) for part in parts), "prompt": made.prompt}
        path = self.run.samples_of(trainer.global_step) / f"{name}.png"
        save_png(Image.fromarray(strip), path, facts)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"samples/{name}", strip, trainer.global_step, dataformats="HWC")

    def _prepare(self, module: EditModule, example: Example) -> tuple[list[Tensor], LatentBatch]:
        """The pictures to show beside the result (decoded where there are no files), and the latents."""
        if isinstance(example.batch, RawBatch):
            negative = module.sampling_rules.negative_prompt(self.sampling)
            return example.pictures, module.encoder(example.batch, negative)
        latents = example.batch.to(module.base.device)
        known = [image for image in (*latents.controls, latents.target_mean) if image is not None]
        return example.pictures or [module.encoder.decode(module.normalize(image)) for image in known], latents


def file_names(keys: Sequence[str]) -> dict[str, str]:
    """A unique file name for each sample: no folders, no more than 240 bytes before a number."""
    names: dict[str, str] = {}
    for number, key in enumerate(keys):
        name = short_name(key.replace("/", "_"), 240)
        names[key] = f"{name}-{number}" if name in names.values() else name
    return names
