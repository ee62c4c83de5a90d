"""Making pictures with a frozen pipeline and LoRAs."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.edits import EditRequest
from datamodules.encoding import EncodeRequest
from datamodules.errors import UserError
from lightning_modules import loading
from lightning_modules.execution import check_attention_backend, compile_blocks, set_attention_backend
from lightning_modules.family import Sampling
from lightning_modules.frozen import FrozenPipeline
from lightning_modules.lora_files import check_fits, read_header
from lightning_modules.rank_schedule import RankGate, read_rank_schedule, sampling_step

log = logging.getLogger("retouch")


class Predictor(FrozenPipeline):
    """A frozen pipeline whose transformer makes pictures.

    Args:
        compile: whether the transformer's blocks are compiled.
        attention_backend: diffusers' name of an attention kernel; None for PyTorch's own choice.
        loras: weights files to apply in prediction.
        sampling: how predicted pictures are made; None where none are.
        pipeline: of `FrozenPipeline`.
    """

    def __init__(
        self,
        compile: bool,
        attention_backend: str | None,
        loras: Sequence[str | Path] = (),
        sampling: Sampling | None = None,
        **pipeline: Any,
    ) -> None:
        super().__init__(**pipeline)
        self.compiles = compile
        self.attention_backend = attention_backend
        self.loras = [Path(lora) for lora in loras]
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
                read_rank_schedule(file)

    def configure_model(self) -> None:
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
        if self.loras:
            names = [f"lora_{number}" for number in range(len(self.loras))]
            self.pipeline().set_adapters(names, [scale] * len(names))

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
        [prompt], [images] = batch.raw.prompts, batch.raw.prompt_images
        for scale, (number, seed) in itertools.product(batch.lora_scales, enumerate(batch.seeds)):
            self.set_lora_scale(scale)
            seconds["denoise"] = seconds["decode"] = 0.0
            pixels = self.edit(latents, self.sampling, batch.size, seed)
            marks = [f"img{number:02d}", f"steps{self.sampling.num_inference_steps}"]
            marks += [] if self.sampling.guidance_scale is None else [f"g{self.sampling.guidance_scale:g}"]
            marks += [f"cfg{self.sampling.true_cfg_scale:g}"] if self.sampling.negative is not None else []
            marks += [f"lora{scale}"] if self.loras else []
            taken = {**seconds, "encode_prompt": self.prompts.seconds(prompt, images)}
            yield (
                pixels,
                {
                    "name": "_".join([batch.name, *marks]),
                    "image": batch.image,
                    "prompt": prompt,
                    **asdict(self.sampling),
                    "width": batch.size[0],
                    "height": batch.size[1],
                    "seed": seed,
                    "lora": [str(lora) for lora in self.loras],
                    "lora_scale": scale,
                    "seconds": {name: round(value, 4) for name, value in taken.items()},
                },
            )

    @torch.no_grad()
    def edit(self, batch: LatentBatch, sampling: Sampling, size: tuple[int, int], seed: int) -> Tensor:
        """One picture (1, 3, H, W), about [-1, 1], from a batch of one: what the stock pipeline gives for the seed.

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
        generator = torch.Generator().manual_seed(seed)
        with self.stopwatch.stage("denoise"):
            latents = self.pipeline().edit(controls, size, generator=generator, **arguments)
        with self.stopwatch.stage("decode"):
            pixels = self.decode(latents)
        self.rest_components()
        if not pixels.isfinite().all():
            log.warning(
                "note: a picture is not finite, and black where it is not: some schedules divide by zero with "
                f"num_inference_steps=1 (here {sampling.num_inference_steps}); else weights have diverged"
            )
        return pixels
