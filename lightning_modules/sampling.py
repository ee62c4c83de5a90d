"""Sampling of images, by the family's diffusers pipeline."""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.edits import EditRequest
from foundation.errors import UserError
from foundation.notes import note_once
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.gates import RankGate, mask_forwards, sampling_step
from lightning_modules.encoder import Encoder
from lightning_modules.family import Family, Sampling, stock_pipeline
from lightning_modules.pretrained.component_files import load_component
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import EMBEDDED
from lightning_modules.pretrained.transformer import TransformerSource

log = logging.getLogger("retouch")


@dataclass(eq=False)
class Sampler:
    """Samples images with a loaded transformer.

    Args:
        loras: applied to it, in prediction.
        sampling: settings in training and in prediction.
    """

    family: Family
    base: FrozenBase
    encoder: Encoder
    loras: AppliedLoRAs
    sampling: Sampling
    transformer: Any = None
    _scheduler: Any = None
    _source: TransformerSource | None = None
    _pipeline: Any = None
    _gates: Sequence[RankGate] = ()

    def check(self) -> None:
        """Raise a UserError for LoRAs that do not fit, and for settings that the pipeline would ignore."""
        self.loras.check_files(self.base)
        self.family.sampling_rules.check_sampling(self.sampling, self.family.pipeline_name)
        if self.sampling.transformer_name_or_path in (None, self.base.transformer_name):
            self.check_source(self.base.source)

    def check_source(self, source: TransformerSource) -> None:
        """Raise a UserError for a shift that the transformer's scheduler does not support; note unused settings."""
        import diffusers

        index = self.base.index | source.pipeline_index()
        name = index["scheduler"][1]
        known = inspect.signature(getattr(diffusers, name, object).__init__).parameters
        if not self.sampling.scheduler_config.keys() <= known.keys():
            raise UserError(
                f"shift={self.sampling.shift:g}: {name} of {source.name} takes no fixed shift. Leave it out."
            )
        rules = self.family.sampling_rules
        if rules.cfg_scale == "guidance_scale":
            takes_guidance = rules.guides_distilled or not index.get("is_distilled")
        else:  # the embedded model has the settings of FLUX Kontext
            takes_guidance = source.meta.config.get("guidance_embeds", False) or source.name == EMBEDDED
        for note in rules.without_effect(self.sampling, takes_guidance):
            note_once(note)

    def use(self, transformer: Any, source: TransformerSource | None = None, gates: Sequence[RankGate] = ()) -> None:
        """Sample with this transformer; None releases the present one.

        Args:
            source: repository of a transformer chosen for sampling; if it is a whole pipeline, its scheduler is used.
            gates: gates of the T-LoRAs in it.
        """
        self.transformer, self._source, self._gates, self._pipeline = transformer, source, gates, None

    def pipeline(self) -> Any:
        """Return the family's pipeline with the transformer, without encoders."""
        if self._pipeline is None:
            parts, pipeline_class = self.base.components, stock_pipeline(self.family.pipeline_name)
            chosen = self._source or self.base.source
            own, known = chosen.pipeline_index(), inspect.signature(pipeline_class.__init__).parameters
            # The transformer's repository says whether it is distilled, and so not guided.
            index = self.base.index | {name: one for name, one in own.items() if name == "is_distilled"}
            settings = {name: one for name, one in index.items() if isinstance(one, bool | int | float)}
            self._scheduler = parts["scheduler"]
            if self._source is not None and "scheduler" in own:
                self._scheduler = load_component(chosen.repository, "scheduler", revision=chosen.revision)
            latent_class = type(pipeline_class.__name__, (self.family.latent_pipeline, pipeline_class), {})
            self._pipeline = latent_class(
                scheduler=self._scheduler,
                vae=parts["vae"],
                transformer=self.transformer,
                **dict.fromkeys(self.family.text_components),
                **{name: one for name, one in settings.items() if name in known},
            )
            self._pipeline.progress_bar = self._note_steps
        return self._pipeline

    @contextmanager
    def _note_steps(self, iterable: None = None, total: int = 0) -> Iterator[Any]:
        """Temporarily replace a pipeline's progress bar: the timer's listeners show each denoising step."""
        steps = itertools.count(1)
        yield SimpleNamespace(
            update=lambda *_: self.base.timer.note_progress(detail=f", denoising step {next(steps)}/{total}")
        )

    def generate(
        self, request: EditRequest, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the request's images, each (1, C, H, W) about [-1, 1], with its record."""
        seconds = self.base.timer.seconds
        seconds["encode_image"] = 0.0
        latents = self.encoder(request.raw, self.family.sampling_rules.negative_prompt(self.sampling))
        wanted = list(itertools.product(range(len(request.raw.prompts)), enumerate(request.seeds)))
        starts = range(0, len(wanted), request.batch_size)
        for index, (scale, start) in enumerate(itertools.product(request.lora_scales, starts), 1):
            if should_stop():
                return
            self.base.timer.note_progress(f"image {index} of {len(request.lora_scales) * len(starts)}")
            together = wanted[start : start + request.batch_size]
            self.loras.set_scale(self.transformer, scale)
            seconds["denoise"] = seconds["decode"] = 0.0
            chosen = choose_samples(latents, [row for row, _ in together])
            seeds = [seed for _, (_, seed) in together]
            images = self.sample(chosen, self.sampling, request.size, seeds, request.box)
            shared = {name: seconds[name] / len(together) for name in ("denoise", "decode")}
            for pixels, (row, (number, seed)) in zip(images.split(1), together, strict=True):
                yield pixels, self._record(request, row, number, seed, scale, seconds | shared)

    def _record(
        self, request: EditRequest, row: int, number: int, seed: int, scale: float, seconds: dict[str, float]
    ) -> dict[str, Any]:
        """Return the record of an image in predictions.jsonl.

        Args:
            row: index of its prompt.
            number: index of its seed.
            seconds: by stage.
        """
        sampling = self.sampling
        prompt, images = request.raw.prompts[row], request.raw.prompt_images[row]
        marks = [f"img{number:02d}", f"steps{sampling.num_inference_steps}"]
        marks += [] if sampling.guidance_scale is None else [f"g{sampling.guidance_scale:g}"]
        marks += [] if (sampling.true_cfg_scale or 1) <= 1 else [f"cfg{sampling.true_cfg_scale:g}"]
        marks += [f"lora{'-by-layer' if self.loras.scales else scale}"] if self.loras.files else []
        taken = {**seconds, "encode_prompt": self.encoder.prompts.seconds(prompt, images)}
        return {
            "name": "_".join([request.raw.keys[row], *marks]),
            "image": request.image,
            "prompt": prompt,
            **asdict(sampling),
            "width": request.box[2] - request.box[0],
            "height": request.box[3] - request.box[1],
            "seed": seed,
            "lora": [str(lora) for lora in self.loras.files],
            "lora_scale": self.loras.scales or scale,
            "lora_weights": self.loras.weights,
            "seconds": {name: round(value, 4) for name, value in taken.items()},
        }

    @torch.no_grad()
    def sample(
        self,
        batch: LatentBatch,
        sampling: Sampling,
        size: tuple[int, int],
        seeds: Sequence[int],
        box: tuple[int, int, int, int] | None = None,
    ) -> Tensor:
        """Sample an image for each sample, (B, C, H, W) about [-1, 1], as the stock pipeline does for its seed.

        Guidance is away from the batch's `empty_prompt`.

        Args:
            size: (width, height).
            box: the part of each image that is kept: left, top, right, bottom; None for all of it.
        """
        base = self.base
        controls = [self.family.normalize(control) for control in batch.controls]
        negative = {} if self.family.sampling_rules.negative_prompt(sampling) is None else batch.empty_prompt
        conditioning = {**batch.prompt, **{f"negative_{name}": tensor for name, tensor in negative.items()}}
        arguments = {
            **{name: tensor.to(base.device) for name, tensor in conditioning.items()},
            "num_inference_steps": sampling.num_inference_steps,
            **self.family.sampling_rules.scales(sampling),
            **self.family.sampling_arguments(sampling, base.index | (self._source or base.source).pipeline_index()),
        }
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        pipeline = self.pipeline()
        pipeline.scheduler = sampling.scheduler(self._scheduler)
        with base.timer.stage("denoise"), ExitStack() as hooks:
            for hook in mask_forwards(self.transformer, self._gates, lambda *_: sampling_step(pipeline)):
                hooks.callback(hook.remove)
            latents = pipeline.edit(controls, size, generator=generators, **arguments)
        with base.timer.stage("decode"):  # one by one: decoding takes much memory
            pixels = torch.cat([self.encoder.decode(one) for one in latents.split(1)])
        base.offload_to_cpu()
        if not pixels.isfinite().all():
            log.warning(
                "note: an image has values that are not finite, shown black. Some schedulers divide by zero with "
                f"num_inference_steps=1 (here {sampling.num_inference_steps}); otherwise the weights have diverged"
            )
        if box is None:
            return pixels
        left, top, right, bottom = box
        return pixels[..., top:bottom, left:right]


def choose_samples(batch: LatentBatch, chosen: Sequence[int]) -> LatentBatch:
    """Return samples of a batch by index, each with the batch's condition images."""

    def pick(conditioning: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[list(chosen)] for name, tensor in conditioning.items()}

    return replace(
        batch,
        keys=[batch.keys[row] for row in chosen],
        controls=[control.expand(len(chosen), -1, -1, -1) for control in batch.controls],
        prompt=pick(batch.prompt),
        empty_prompt=pick(batch.empty_prompt),
    )
