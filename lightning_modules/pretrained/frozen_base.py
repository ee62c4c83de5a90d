"""The frozen pipeline: loading it part by part, and encoding with it."""

import logging
import math
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from datamodules.batch import LatentBatch, RawBatch
from datamodules.errors import UserError, listing
from datamodules.images.transforms import PREPROCESSING
from lightning_modules import flow
from lightning_modules.execution.block_offload import BlockStream, streamed_blocks
from lightning_modules.family import Family
from lightning_modules.pretrained import repository as loading
from lightning_modules.pretrained.component_files import check_component
from lightning_modules.pretrained.components import Components, PromptMemory, Stopwatch
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.quantization import Quantization

log = logging.getLogger("retouch")


@cache
def _note_once(text: str) -> None:
    """A run has several modules."""
    log.warning(f"note: {text}")


class FrozenPipeline(L.LightningModule, Family):
    """A pipeline whose own weights never change.

    Nothing is loaded before `setup`; the transformer comes in `configure_model` where one is needed, each other
    component when it is first used. The frozen encoders are not submodules: Lightning neither moves nor saves them.

    Args:
        pretrained_model_name_or_path: folder or hub id in diffusers' layout, or `embedded`.
        transformer_name_or_path: where the transformer comes from; None for the same repository.
        revision: branch, tag or commit of pretrained_model_name_or_path on the hub.
        dtype: of the frozen weights, `float32` or `bfloat16`.
        devices: for `text_encoder` and `vae`, where they live; None for beside the transformer. For
            `transformer`, train.py and predict.py set the trainer to it.
        vae_encode_mode: train on a `sample` of the target's latent distribution, or on its `mode`.
        quantization: of the transformer, and of other components that it names; None where all stay in `dtype`.
            A transformer that is quantized on disk is loaded as it is, whatever this says.
        offload: what waits in the host's memory: `encoders`, whether the other components do beside a loaded
            transformer; `blocks`, how many of its blocks.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        transformer_name_or_path: str | None,
        revision: str | None,
        dtype: str,
        devices: Mapping[str, str | None],
        vae_encode_mode: str,
        quantization: Quantization | None,
        offload: Mapping[str, Any],
    ) -> None:
        super().__init__()
        if vae_encode_mode not in ("sample", "mode"):
            raise UserError(f"model.vae_encode_mode={vae_encode_mode}: choose sample or mode")
        self.repository_name = pretrained_model_name_or_path
        self.transformer_name = transformer_name_or_path or pretrained_model_name_or_path
        self.revision = revision
        self.base_dtype = loading.resolve_dtype(dtype)
        self.placement = {
            name: loading.resolve_device(device, f"model.devices.{name}") for name, device in devices.items()
        }
        self.vae_encode_mode = vae_encode_mode
        in_transformer = quantization is not None and "transformer" in quantization.components_to_quantize
        self.source = TransformerSource(
            self.transformer_class,
            self.transformer_name,
            # Of the pipeline's repository alone.
            revision if self.transformer_name == self.repository_name else None,
            self.base_dtype,
            quantization if in_transformer else None,
            offload["blocks"],
        )
        self.offload = offload
        self.transformer: nn.Module | None = None
        self.stopwatch = Stopwatch()
        self.components = Components(
            pretrained_model_name_or_path,
            revision,
            self.base_dtype,
            self.placement,
            lambda: self.main_device,
            self.stopwatch,
            quantization,
        )
        self.prompts = PromptMemory(self.encode_prompt, self.stopwatch)

    # Loading

    def setup(self, stage: str) -> None:
        self.preflight()
        self.check_files()
        if stage == "predict":
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self.stopwatch.synchronize = self.main_device
            with torch.no_grad():
                kept = self.prompts.keep(data.all_prompts(), self.condition_images.for_text, self.trainer.num_devices)
            if kept:
                self.components.release(*self.text_components)

    def preflight(self) -> None:
        """Find what would go wrong before any weights are read."""
        index = loading.read_index(self.components.repository, self.revision)
        made_for = index.get("_class_name")
        if lacking := [name for name in (*self.text_components, "vae", "scheduler") if name not in index]:
            raise UserError(
                f"{self.repository_name} has no {listing(lacking)}, which {type(self).__name__} needs: it is made for "
                f"{made_for}"
            )
        self.components.check_quantization([name for name in self.text_components if name in index])
        found = self.source.config().get("_class_name")
        if found not in (self.transformer_class, None):
            raise UserError(
                f"{self.transformer_name} holds a {found}, {type(self).__name__} needs a {self.transformer_class}: "
                "choose the model= that goes with it"
            )
        self.source.preflight()
        if made_for != self.pipeline_name:
            _note_once(
                f"{self.repository_name} is made for {made_for}, {type(self).__name__} uses it as "
                f"{self.pipeline_name} does: is it the right model=?"
            )

    def configure_model(self) -> None:
        """Lightning makes the trainer's device PyTorch's default here; what goes there says so itself instead."""
        with torch.device("cpu"):
            self.build()

    def build(self) -> None:
        """Load what `configure_model` should; can be called twice."""

    def check_files(self) -> None:
        """Find what a local repository lacks, without reading weights; those of the hub are looked at when they load.

        Raises:
            UserError: a component's file is missing or damaged.
        """
        index = loading.read_index(self.components.repository, self.revision)
        for name in (*self.text_components, "vae", "scheduler"):
            folder = Path(self.components.repository, name)
            if folder.is_dir():
                check_component(folder, index[name][1])

    def meta_transformer(self) -> Any:
        """The transformer without weights."""
        return self.source.meta

    def load_transformer(self) -> Any:
        """The transformer on its device, frozen."""
        with self.stopwatch.stage("load"):
            return self.source.load(self.main_device, split=self.device_mesh is not None)

    def stream_blocks(self) -> None:
        """Give the offloaded blocks of the transformer what lets them compute; adapters must be there."""
        assert self.transformer is not None
        if self.offload["blocks"]:
            BlockStream(list(streamed_blocks(self.transformer, self.offload["blocks"]).values()), self.main_device)
            self.transformer.to(self.main_device)  # what is left of the blocks

    def rest_components(self) -> None:
        """Encoders and autoencoder make room beside the transformer, if they are told to."""
        if self.offload["encoders"] and self.transformer is not None:
            self.components.rest()

    @property
    def main_device(self) -> torch.device:
        """Where the transformer is."""
        return self.trainer.strategy.root_device if self._trainer is not None else self.device

    def cpu(self) -> Self:
        """Lightning's last call in every run: let the weights go, instead of copying them to the host's memory."""
        self.transformer = None
        self.components.release(*self.components.models())
        return super().cpu()

    @cached_property
    def vae_config(self) -> dict[str, Any]:
        """Known without loading the autoencoder: training from cached latents never needs its weights."""
        return loading.component_config(self.components.repository, "vae", self.revision)

    def latent_size(self, width: int, height: int) -> torch.Size:
        """(height, width) of a picture's latent."""
        halvings = self.vae_config.get("temperal_downsample") or self.vae_config["block_out_channels"][1:]
        return torch.Size((height >> len(halvings), width >> len(halvings)))

    def for_vae(self, pixels: Tensor) -> Tensor:
        """Pixels on the autoencoder's device, in its dtype and in diffusers' layout, by which bf16 kernels round."""
        return pixels.to(self.components.device("vae"), self.base_dtype, memory_format=torch.channels_last)

    def dynamic_shift(self, shape: torch.Size) -> float:
        """The pipeline's timestep shift for a latent of shape (C, h, w) or (h, w)."""
        config = self.components["scheduler"].config
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        return flow.dynamic_shift(shape[-2] * shape[-1] // 4, **{n: config[n] for n in names if n in config})

    def sampling_timesteps(self, shape: torch.Size, num_inference_steps: int) -> Tensor:
        """The pipeline's timesteps (num_inference_steps,), in [0, 1000], for a latent of shape (C, h, w) or (h, w)."""
        scheduler = self.components["scheduler"]
        sigmas = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps, dtype=torch.float64)
        scheduler.set_timesteps(sigmas=sigmas.tolist(), mu=math.log(self.dynamic_shift(shape)))
        return scheduler.timesteps

    def token_count(self, batch: LatentBatch) -> int:
        """Tokens that the transformer sees for the batch, in patches of 2x2: text, target and controls."""
        images = [image for image in (batch.target_mean, *batch.controls) if image is not None]
        tokens = batch.prompt["prompt_embeds"].shape[1] + sum(image[0, 0].numel() // 4 for image in images)
        return tokens * len(batch.keys)

    # Encoding: the one way from pixels and prompts to what the transformer sees

    def encoding_parts(self, memo: Path) -> dict[str, Any]:
        """All that `encode` depends on beside the samples: what a cache's fingerprint is made of.

        Args:
            memo: a file that remembers the checksums of a local model's files.
        """
        names = (*self.text_components, "vae")
        return {
            "family": type(self).__name__,
            "model": loading.encoders_identity(self.components.repository, self.revision, names, memo),
            "dtype": str(self.base_dtype).removeprefix("torch."),
            "preprocessing": PREPROCESSING,
            "vae_encode_mode": self.vae_encode_mode,
            "settings": self.encoding_settings(),
            **self.components.quantization_settings(),
            "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        }

    @torch.no_grad()
    def encode(self, batch: RawBatch, negative_prompt: str | None = None) -> LatentBatch:
        """Run the frozen encoders; deterministic, so the result may be cached.

        Args:
            negative_prompt: encode this too, as the batch's `empty_prompt`; in training it is "".
        """
        target_mean = target_std = None
        with torch.autocast(self.main_device.type, enabled=False):
            with self.stopwatch.stage("encode_image"):
                if batch.target is not None:
                    target_mean, target_std = self.encode_pixels(batch.target)
                controls = [self.encode_pixels(control)[0] for control in batch.controls]
            self.rest_components()
            images = batch.prompt_images
            prompt, empty = self.prompts(batch.prompts, images, self.main_device), {}
            if negative_prompt is not None:
                empty = self.prompts([negative_prompt] * len(images), images, self.main_device)
        self.rest_components()
        return LatentBatch(
            batch.keys, batch.draws, target_mean, target_std, controls, prompt, empty, batch.mask, batch.prompts
        )

    def provenance(self) -> dict[str, Any]:
        """What a LoRA file's header says of its base."""
        return {
            "base": self.repository_name,
            "transformer": self.transformer_name,
            "base_precision": self.source.precision,
            **{f"{name}_precision": str(self.components.quantization) for name in self.components.quantized},
        }
