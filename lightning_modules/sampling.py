"""Making pictures with a frozen pipeline and LoRAs."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.edits import EditRequest
from datamodules.encoding import EncodeRequest
from datamodules.errors import UserError
from lightning_modules.adapters.applied import MergedLoRAs
from lightning_modules.adapters.formats.diffusers import check_fits, read_header
from lightning_modules.adapters.rank_mask import NOT_MERGED, RankGate, read_rank_schedule, sampling_step
from lightning_modules.execution.kernels import (
    check_attention_backend,
    compile_blocks,
    say_fp8_kernels,
    set_attention_backend,
)
from lightning_modules.family import Sampling
from lightning_modules.pretrained import repository as loading
from lightning_modules.pretrained.frozen_base import FrozenPipeline

log = logging.getLogger("retouch")


class Predictor(FrozenPipeline):
    """A frozen pipeline whose transformer makes pictures.

    Args:
        compile: whether the transformer's blocks are compiled.
        attention_backend: diffusers' name of an attention kernel; None for PyTorch's own choice.
        loras: weights files to apply in prediction.
        merge_lora: whether they become a part of the weights while pictures are made.
        sampling: how predicted pictures are made; None where none are.
        pipeline: of `FrozenPipeline`.
    """

    def __init__(
        self,
        compile: bool,
        attention_backend: str | None,
        loras: Sequence[str | Path] = (),
        merge_lora: bool = False,
        sampling: Sampling | None = None,
        **pipeline: Any,
    ) -> None:
        super().__init__(**pipeline)
        self.compiles = compile
        self.attention_backend = attention_backend
        self.loras = [Path(lora) for lora in loras]
        self.merge_lora = merge_lora
        self._merged: MergedLoRAs | None = None
        self._scale: float | None = None
        self.sampling = sampling
        # Of the adapters that are T-LoRAs; callbacks.rank_schedule opens them.
        self.rank_gates: list[RankGate] = []
        self._pipeline: Any = None

    def preflight(self) -> None:
        super().preflight()
        check_attention_backend(self.attention_backend)
        if self.compiles and self.source.backend == "torchao":
            raise UserError("model.compile does not go with model.quantization.backend=torchao: leave the backend out")
        for file in self.loras:
            # Files from elsewhere may be in any format that diffusers converts: it will say what does not fit.
            if read_header(file) is not None:
                check_fits(file, self.meta_transformer(), self.repository_name)
                if read_rank_schedule(file) is not None and self.merge_lora:
                    raise UserError(f"merge_lora=true: {NOT_MERGED}")
        if self.loras and self.merge_lora:
            if self.source.expected_precision not in loading.DTYPES:
                raise UserError(
                    f"merge_lora=true: a weight of {self.source.expected_precision} cannot take a LoRA in without loss"
                )
            if self.offload["blocks"]:
                raise UserError("merge_lora=true does not go with model.offload.blocks")

    def build(self) -> None:
        """Load the transformer where pictures are made; encoding needs none."""
        if self.transformer is None and self.sampling is not None:
            if self.offload["encoders"]:
                self.components.rest()
            self.transformer = self.load_transformer()
            self._load_loras()
            self.stream_blocks()
            self.prepare_blocks(dynamic=None)

    def prepare_blocks(self, dynamic: bool | None) -> None:
        """Choose their kernels; quantized layers and adapters must be there.

        Args:
            dynamic: of `compile_blocks`.
        """
        set_attention_backend(self.transformer, self.attention_backend)
        say_fp8_kernels(self.transformer, self.main_device)
        if self.compiles:
            compile_blocks(self.transformer, dynamic)

    def _load_loras(self) -> None:
        self.rank_gates = []
        for number, file in enumerate(self.loras):
            try:
                self.pipeline().load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"lora_{number}")
            except (ValueError, RuntimeError, KeyError) as error:
                first = str(error).strip().splitlines()[0]
                raise UserError(f"the LoRA {file} does not fit {self.repository_name}: {first}") from error
            if f"lora_{number}" not in getattr(self.transformer, "peft_config", {}):
                raise UserError(f"the LoRA {file} holds no layer of {self.repository_name}'s transformer")
            gate = read_rank_schedule(file)
            if gate is not None:
                assert self.transformer is not None
                gate.attach(self.transformer, f"lora_{number}")
                self.rank_gates.append(gate)
        self.requires_grad_(False)

    def set_lora_scale(self, scale: float) -> None:
        """Weigh the LoRAs of a prediction, all by the same factor."""
        if not self.loras or scale == self._scale:
            return
        self._scale = scale
        names = [f"lora_{number}" for number in range(len(self.loras))]
        self.pipeline().set_adapters(names, [scale] * len(names))
        if self.merge_lora:
            self._merged = self._merged or MergedLoRAs(self.transformer, names)
            self._merged.merge()

    def on_predict_end(self) -> None:
        if self._merged is not None:
            self._merged.unmerge()
        self._merged = self._scale = None

    def pipeline(self) -> Any:
        """The family's pipeline around the transformer that is loaded, for all but encoding."""
        if self._pipeline is None:
            self._pipeline = self.pipeline_class()(
                scheduler=loading.load_component(self.components.repository, "scheduler", revision=self.revision),
                vae=self.components["vae"],
                transformer=self.transformer,
                **dict.fromkeys(self.text_components),
            )
            self._pipeline.set_progress_bar_config(disable=True)
        return self._pipeline

    def sampling_step(self) -> tuple[Tensor, Tensor] | None:
        """The sampling step that runs, as `rank_schedule.mask_forwards` asks."""
        return None if self._pipeline is None else sampling_step(self._pipeline)

    def cpu(self) -> Self:
        self._pipeline = None
        return super().cpu()

    def predict_step(self, batch: EditRequest | EncodeRequest, batch_idx: int) -> Any:
        """The latents of a sample, or the pictures of an edit."""
        if isinstance(batch, EncodeRequest):
            return self.encode(batch.raw, "")
        return self.pictures(batch)

    def pictures(self, batch: EditRequest) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The request's pictures, each (1, 3, H, W) about [-1, 1], with the facts of how it was made."""
        assert self.sampling is not None
        seconds = self.stopwatch.seconds
        seconds["encode_image"] = 0.0
        latents = self.encode(batch.raw, self.sampling.negative)
        wanted = list(itertools.product(range(len(batch.raw.prompts)), enumerate(batch.seeds)))
        starts = range(0, len(wanted), batch.batch_size)
        for scale, start in itertools.product(batch.lora_scales, starts):
            if self._trainer is not None and self.trainer.should_stop:
                return
            together = wanted[start : start + batch.batch_size]
            self.set_lora_scale(scale)
            seconds["denoise"] = seconds["decode"] = 0.0
            chosen = rows(latents, [row for row, _ in together])
            made = self.edits(chosen, self.sampling, batch.size, [seed for _, (_, seed) in together])
            shared = {name: seconds[name] / len(together) for name in ("denoise", "decode")}
            for pixels, (row, (number, seed)) in zip(made.split(1), together, strict=True):
                prompt, images = batch.raw.prompts[row], batch.raw.prompt_images[row]
                marks = [f"img{number:02d}", f"steps{self.sampling.num_inference_steps}"]
                marks += [] if self.sampling.guidance_scale is None else [f"g{self.sampling.guidance_scale:g}"]
                marks += [f"cfg{self.sampling.true_cfg_scale:g}"] if self.sampling.negative is not None else []
                marks += [f"lora{scale}"] if self.loras else []
                taken = {**seconds, **shared, "encode_prompt": self.prompts.seconds(prompt, images)}
                record = {
                    "name": "_".join([batch.raw.keys[row], *marks]),
                    "image": batch.image,
                    "prompt": prompt,
                    **asdict(self.sampling),
                    "width": batch.size[0],
                    "height": batch.size[1],
                    "seed": seed,
                    "lora": [str(lora) for lora in self.loras],
                    "lora_scale": scale,
                    "seconds": {name: round(value, 4) for name, value in taken.items()},
                }
                yield pixels, record

    def edit(self, batch: LatentBatch, sampling: Sampling, size: tuple[int, int], seed: int) -> Tensor:
        """One picture (1, 3, H, W), about [-1, 1], from a batch of one: what the stock pipeline gives for the seed."""
        return self.edits(batch, sampling, size, [seed])

    @torch.no_grad()
    def edits(self, batch: LatentBatch, sampling: Sampling, size: tuple[int, int], seeds: Sequence[int]) -> Tensor:
        """A picture of each sample, (B, 3, H, W), about [-1, 1].

        True CFG takes the batch's `empty_prompt` as its negative.
        """
        controls = [self.normalize(control) for control in batch.controls]
        negative = {} if sampling.negative is None else batch.empty_prompt
        conditioning = {**batch.prompt, **{f"negative_{name}": tensor for name, tensor in negative.items()}}
        arguments = {
            **{name: tensor.to(self.main_device) for name, tensor in conditioning.items()},
            "true_cfg_scale": sampling.true_cfg_scale,
            "guidance_scale": sampling.guidance_scale,
            "num_inference_steps": sampling.num_inference_steps,
        }
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        with self.stopwatch.stage("denoise"):
            latents = self.pipeline().edit(controls, size, generator=generators, **arguments)
        with self.stopwatch.stage("decode"):  # one by one: a picture takes much memory, and decodes the same alone
            pixels = torch.cat([self.decode(one) for one in latents.split(1)])
        self.rest_components()
        if not pixels.isfinite().all():
            log.warning(
                "note: a picture is not finite, and black where it is not: some schedules divide by zero with "
                f"num_inference_steps=1 (here {sampling.num_inference_steps}); else weights have diverged"
            )
        return pixels


def rows(batch: LatentBatch, chosen: Sequence[int]) -> LatentBatch:
    """Samples of a batch, by their numbers; the condition images, which are there once, for each."""

    def pick(conditioning: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[list(chosen)] for name, tensor in conditioning.items()}

    return replace(
        batch,
        keys=[batch.keys[row] for row in chosen],
        controls=[control.expand(len(chosen), -1, -1, -1) for control in batch.controls],
        prompt=pick(batch.prompt),
        empty_prompt=pick(batch.empty_prompt),
    )
