"""Sample images with fixed seeds during training."""

from dataclasses import replace
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from torch import Tensor

from callbacks.image_writer import log_image
from datamodules.batch import LatentBatch, RawBatch
from datamodules.edits import own_edits
from datamodules.pairs import PairsDataModule
from foundation.errors import UserError
from lightning_modules.edit_module import EditModule
from lightning_modules.inference import SamplingTransformer, inference_weights
from lightning_modules.timing import NOT_TRAINING
from report.images import Strip, file_names, save_png, to_image
from runs.run_folder import RunFolder, best_effort
from runs.shares import is_stopped, of_all, of_first, share
from runs.signals import stop


class Shown(NamedTuple):
    """Conditions of a sample image of `size` (width, height); an image of sample_root has no target."""

    controls: list[Tensor]
    target: Tensor | None
    size: tuple[int, int]
    latents: LatentBatch
    box: tuple[int, int, int, int] | None = None


class Made(NamedTuple):
    """Content of a strip, on the CPU; an image of sample_root has no target."""

    key: str
    prompt: str
    controls: list[Tensor]
    target: Tensor | None
    result: Tensor


class SampleImages(L.Callback):
    """Sample before training, every `sample_every` steps and at the end: samples/step-N/KEY.png, control|result|target.

    The computation and the settings, model.sampling, are those of predict.py. Training does not depend on it: it has a
    random generator of its own. Processes divide the samples; the first one writes.

    Args:
        sample_every: optimizer steps between two sets; 0: before the first step, on request and at the end.
        count: number of samples, the first held-out ones, or of the training data without these.
        seed: seed of each image, as in prediction.
        root: images without targets, see `own_edits`; None for none.
        trigger_word: replaces [trigger] in their prompts.
        max_area: pixels to which larger ones of these are shrunk, as in prediction.

    Attributes:
        results: strips of the last sampling, in every process.
        sampled_step: step of the last sampling.
    """

    def __init__(
        self,
        output_dir: str,
        sample_every: int,
        count: int,
        seed: int,
        root: str | None,
        trigger_word: str | None,
        max_area: int | None,
    ) -> None:
        self.run = RunFolder(output_dir)
        self.sample_every = sample_every
        self.count = count
        self.seed = seed
        self.edits = None if root is None else own_edits(root, seed, max_area, trigger_word)
        self._other: SamplingTransformer | None = None
        self._shown: list[Shown] | None = None  # this process's
        self._step = 0
        self.results: list[Made] = []
        self.sampled_step = -1

    def setup(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        self.sampling = pl_module.sampler.sampling
        self.negative_prompt = pl_module.sampling_rules.negative_prompt(self.sampling)
        if self.sampling.transformer_name_or_path is not None:
            self._other = SamplingTransformer(pl_module, self.sampling.transformer_name_or_path)
            self._other.check()
        if self.edits is not None:
            self.edits.configure_for(pl_module)
        if not PairsDataModule.of(trainer).needs_encoders and (self.edits is not None or self.negative_prompt):
            # Before the transformer is loaded, next to which the encoders may not fit.
            pl_module.base.check()
            pl_module.base.check_files()
            self._shown = self._prepare(trainer, pl_module)
            pl_module.base.components.release(*pl_module.text_components)

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self._step = trainer.global_step
        # A resumed run may have been killed before this step had all its images.
        made, first = (len(list(self.run.samples_of(step).glob("*.png"))) for step in (self._step, 0))
        self.sample_if_due(trainer, pl_module, of_first(trainer, self._step == 0 or made < first))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        self.sample_if_due(trainer, pl_module, trainer.global_step != self._step)
        self._step = trainer.global_step

    def sample_if_due(self, trainer: L.Trainer, pl_module: EditModule, missing: bool) -> None:
        """Sample the images of this step if it has some and they are `missing`."""
        step = trainer.global_step
        due = step in (0, trainer.max_steps) or (self.sample_every > 0 and step % self.sample_every == 0)
        if (due or "sample" in stop.requests) and missing:
            with pl_module.base.timer.stage(NOT_TRAINING):
                self.sample(trainer, pl_module)

    def sample(self, trainer: L.Trainer, module: EditModule) -> None:
        """Write one strip for each of the first samples, and for each edit of sample_root."""
        note = module.base.timer.note_progress
        if self._shown is None:
            note("preparing samples")
            self._shown = self._prepare(trainer, module)
        made = []
        weights = inference_weights(module) if self._other is None else self._other.in_use()
        with torch.no_grad(), weights:
            for number, (controls, target, size, latents, box) in enumerate(self._shown, start=1):
                if is_stopped(trainer):
                    break
                note(f"sampling {number}/{len(self._shown)}")
                latents = module.encoder.refresh_prompt_embeds(latents.to(module.base.device), self.negative_prompt)
                result = module.sampler.sample(latents, self.sampling, size, [self.seed], box)
                made.append(Made(latents.keys[0], " ".join(latents.prompts), controls, target, result.cpu()))
        if is_stopped(trainer, together=True):  # the resumed run samples all of them
            return
        self.results, self.sampled_step = of_all(trainer, made), trainer.global_step
        if not (trainer.is_global_zero and self.results):
            return
        names = file_names([one.key for one in self.results])
        first = min(self.results, key=lambda made: (not made.controls, names[made.key]))
        # Their own files may be inside a table or a tar.
        for number, control in enumerate(first.controls if not self.run.controls() else (), start=1):
            path = self.run.samples / f"control{f'_{number}' if number > 1 else ''}.png"
            with best_effort(str(path)):
                save_png(to_image(control), path)
        data = PairsDataModule.of(trainer)
        private = data.sample_set.outside((data.validation or data.training).samples[: self.count])
        for one in self.results:
            with best_effort(f"sample image of {one.key}"):
                goal = None if one.target is None else to_image(one.target)
                images = list(map(to_image, one.controls)), to_image(one.result), goal
                strip = Strip(*images, one.prompt, private=goal is None or one.key in private)
                image = strip.write(self.run.samples_of(trainer.global_step) / f"{names[one.key]}.png")
                log_image(trainer, f"samples/{names[one.key]}", image)

    def _prepare(self, trainer: L.Trainer, module: EditModule) -> list[Shown]:
        data, negative = PairsDataModule.of(trainer), self.negative_prompt
        split = data.validation or data.training
        count = min(self.count, len(split))

        def encode(batch: RawBatch | LatentBatch) -> LatentBatch:
            if isinstance(batch, RawBatch):
                batch = replace(batch, target=None, rejected=None, mask=None)
                return module.encoder(batch, negative).map(torch.Tensor.cpu)
            if negative:
                if module.condition_images.text_sees_them:
                    raise UserError(
                        f"negative_prompt={negative}: data.shards holds no images for the text encoder to see with it. "
                        "Train on data.root, or set callbacks.sample_images=null."
                    )
                alone = RawBatch(["negative prompt"], [0], [negative], None, [])
                batch.empty_prompt = module.encoder(alone).map(torch.Tensor.cpu).prompt
            return batch

        shown = []
        mine = share(trainer, count)
        pixels = data.pixels(split, mine)
        # A cache contains the conditioning of the empty prompt only.
        as_pixels = negative and split.views
        for batch in pixels if as_pixels else data.one_by_one(split, mine, empty_prompt=negative is not None):
            if isinstance(batch, RawBatch):
                images = batch.images
            elif split.views:
                images = next(pixels).images
            else:
                known = [one for one in (*batch.controls, batch.target_mean) if one is not None]
                images = [module.encoder.decode(module.normalize(one.to(module.base.device))) for one in known]
            *controls, target = images
            height, width = target.shape[-2:]
            shown.append(Shown(controls, target, (width, height), encode(batch)))
        if self.edits is not None:
            edits = [*[None] * count, *self.edits.edits]
            for edit in filter(None, edits[share(trainer, len(edits))]):
                request = self.edits.request(edit)
                shown.append(Shown(request.raw.controls, None, request.size, encode(request.raw), request.box))
        return shown
