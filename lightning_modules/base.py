"""What all model families share: encode -> noise -> velocity -> loss, and encode -> denoise -> decode."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from datamodules.batch import LatentBatch, RawBatch
from datamodules.edits import EditRequest
from datamodules.encoding import EncodeRequest
from datamodules.errors import UserError, listing
from datamodules.transforms import PREPROCESSING
from lightning_modules import flow, loading
from lightning_modules.components import Components, PromptMemory, Stopwatch
from lightning_modules.family import Family, Sampling
from lightning_modules.lora import LoRA, check_fits, read_header, trainable

log = logging.getLogger("retouch")


class EditModule(L.LightningModule, Family):
    """A frozen pipeline with a trainable adapter in its transformer.

    Nothing is loaded before `setup`; the transformer comes in `configure_model`, each other component when
    it is first used. The frozen encoders are not submodules: Lightning neither moves nor saves them.

    Args:
        pretrained_model_name_or_path: folder or hub id in diffusers' layout, or `embedded`.
        transformer_name_or_path: where the transformer comes from; None for the same repository.
        revision: branch, tag or commit of pretrained_model_name_or_path on the hub.
        dtype: of the frozen weights, `float32` or `bfloat16`.
        devices: for `text_encoder` and `vae`, where they live; None for beside the transformer. For
            `transformer`, train.py and predict.py set the trainer to it.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.
        timesteps: the distribution of training timesteps.
        vae_encode_mode: train on a `sample` of the target's latent distribution, or on its `mode`.
        max_nonfinite_steps: stop after so many steps in a row whose gradient is not finite.
        adapter: what trains; None in prediction.
        loras: weights files to apply in prediction.
        sampling: how predicted pictures are made.
        optimizer: called with the trainable parameters.
        scheduler: called with the optimizer; counts optimizer steps.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        transformer_name_or_path: str | None,
        revision: str | None,
        dtype: str,
        devices: Mapping[str, str | None],
        gradient_checkpointing: bool,
        timesteps: flow.TimestepLaw,
        vae_encode_mode: str,
        max_nonfinite_steps: int,
        seed: int,
        adapter: LoRA | None = None,
        loras: Sequence[str | Path] = (),
        sampling: Sampling | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None = None,
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
        self.gradient_checkpointing = gradient_checkpointing
        self.timesteps = timesteps
        self.vae_encode_mode = vae_encode_mode
        self.caption_dropout_rate = 0.0  # the data's, from `setup` on
        self.max_nonfinite_steps = max_nonfinite_steps
        self.seed = seed
        self.adapter = adapter
        self.loras = [Path(lora) for lora in loras]
        self.sampling = sampling
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.transformer: nn.Module | None = None
        self.grad_norm: Tensor | None = None
        self.nonfinite_steps = 0
        self.batch_tokens = 0
        self.batch_loss = torch.zeros(())
        self.stopwatch = Stopwatch()
        self.components = Components(
            pretrained_model_name_or_path,
            revision,
            self.base_dtype,
            self.placement,
            lambda: self.main_device,
            self.stopwatch,
        )
        self.prompts = PromptMemory(self.encode_prompts, self.stopwatch)
        self._pipeline: Any = None
        self._checked = False
        self._window: list[tuple[str, Tensor]] = []
        # The checkpoint holds the adapter only; on_load_checkpoint compares its keys.
        self.strict_loading = False

    # Loading

    def setup(self, stage: str) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if stage == "fit":
            self._check_precision()
            self.caption_dropout_rate = data.caption_dropout_rate
        self.preflight()
        if stage == "predict":
            self.stopwatch.synchronize = self.main_device
            with torch.no_grad():
                kept = self.prompts.keep(data.all_prompts(), self.trainer.num_devices)
            if kept:
                self.components.release(*self.text_components)

    def preflight(self) -> None:
        """Find what would go wrong before any weights are read: repository, target modules, LoRA shapes."""
        if self._checked:
            return
        import diffusers

        loading.read_index(self.components.repository, self.revision)
        cls = getattr(diffusers, self.transformer_class)
        meta = loading.meta_transformer(cls, *self._transformer_source())
        # Files from elsewhere may be in any format that diffusers converts: it will say what does not fit.
        files = [file for file in self.loras if read_header(file) is not None]
        files += [self.adapter.init_from] if self.adapter and self.adapter.init_from else []
        for file in files:
            check_fits(file, meta, self.repository_name)
        if self.adapter is not None:
            self.adapter.resolve_targets(meta)
        self._checked = True

    def _transformer_source(self) -> tuple[str, str | None]:
        """The transformer's repository and revision; `revision` is that of the pipeline's repository alone."""
        same = self.transformer_name == self.repository_name
        return loading.resolve_repository(self.transformer_name), self.revision if same else None

    def _check_precision(self) -> None:
        needed = "32-true" if self.base_dtype == torch.float32 else "bf16-mixed"
        if self.trainer.precision != needed:
            raise UserError(
                f"trainer.precision={self.trainer.precision} does not go with model.dtype={str(self.base_dtype)[6:]}: "
                f"use {needed}, which keeps the LoRA's own weights in float32"
            )

    def configure_model(self) -> None:
        if self.transformer is not None or (self.adapter is None and self.sampling is None):
            return  # to encode, no transformer is needed
        import diffusers

        with self.stopwatch.stage("load"):
            repository, revision = self._transformer_source()
            transformer = loading.load_transformer(
                getattr(diffusers, self.transformer_class),
                repository,
                revision=revision,
                dtype=self.base_dtype,
                device=self.main_device,
            )
        if self.gradient_checkpointing and self.adapter is not None:
            transformer.enable_gradient_checkpointing()
        if self.adapter is not None:
            self.adapter.inject(transformer)
        self.transformer = transformer
        if self.loras:
            self._load_loras()

    def _load_loras(self) -> None:
        pipeline = self.pipeline()
        for number, file in enumerate(self.loras):
            try:
                pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"lora_{number}")
            except (ValueError, RuntimeError, KeyError) as error:
                first = str(error).strip().splitlines()[0]
                raise UserError(f"the LoRA {file} does not fit {self.repository_name}: {first}") from error
            if f"lora_{number}" not in getattr(self.transformer, "peft_config", {}):
                raise UserError(f"the LoRA {file} holds no layer of {self.repository_name}'s transformer")
        self.requires_grad_(False)

    def set_lora_scale(self, scale: float) -> None:
        """Weigh the LoRAs of a prediction, all by the same factor."""
        if self.loras:
            names = [f"lora_{number}" for number in range(len(self.loras))]
            self.pipeline().set_adapters(names, [scale] * len(names))

    @property
    def main_device(self) -> torch.device:
        """Where the transformer is."""
        return self.trainer.strategy.root_device if self._trainer is not None else self.device

    def on_fit_start(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.needs_encoders:
            for name in (*self.text_components, "vae"):
                self.components[name]

    def cpu(self) -> Self:
        """Lightning's last call in every run: let the weights go, instead of copying them to the host's memory."""
        self.transformer = self._pipeline = None
        self.components.release(*self.components.models())
        return super().cpu()

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
            "prompts": self.prompt_settings(),
            "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")},
        }

    @torch.no_grad()
    def encode(self, batch: RawBatch, empty_prompt: bool = False) -> LatentBatch:
        """Run the frozen encoders; deterministic, so the result may be cached.

        Args:
            empty_prompt: encode the empty prompt too, for caption dropout.
        """
        target_mean = target_std = None
        with torch.autocast(self.main_device.type, enabled=False):
            with self.stopwatch.stage("encode_image"):
                if batch.target is not None:
                    target_mean, target_std = self.encode_pixels(batch.target)
                controls = [self.encode_pixels(control)[0] for control in batch.controls]
            prompt = self.prompts(batch.prompts, self.main_device)
            empty = self.prompts([""] * len(batch.prompts), self.main_device) if empty_prompt else {}
        return LatentBatch(batch.keys, batch.draws, target_mean, target_std, controls, prompt, empty, batch.mask)

    # Training

    def training_step(self, batch: RawBatch | LatentBatch, batch_idx: int) -> Tensor:
        latents = self.encode(batch, self.caption_dropout_rate > 0) if isinstance(batch, RawBatch) else batch
        losses = self.losses(latents)
        self._window += list(zip(latents.keys, losses.detach(), strict=True))
        self.batch_tokens = self.token_count(latents)
        self.batch_loss = losses.detach().mean()
        return losses.mean()

    def losses(self, batch: LatentBatch) -> Tensor:
        """Each sample's flow-matching loss (B,), its randomness drawn from (seed, draw number)."""
        mean = batch.target_mean
        assert mean is not None
        shape = mean.shape[1:]
        drawn = flow.draw(self.seed, batch.draws, shape, self.timesteps, self.dynamic_shift(shape))
        t, eps = drawn.t.to(mean.device), drawn.eps.to(mean.device)
        target = mean.float()
        if self.vae_encode_mode == "sample":
            assert batch.target_std is not None
            target = target + batch.target_std.float() * drawn.latent_eps.to(mean.device)
        x0 = self.normalize(target)
        controls = [self.normalize(control.float()) for control in batch.controls]
        prompt = self._drop_captions(batch, drawn.dropout)
        velocity = self.velocity(flow.interpolate(x0, eps, t), t, controls, prompt)
        return flow.flow_loss(velocity, flow.velocity_target(x0, eps), batch.mask)

    def _drop_captions(self, batch: LatentBatch, dropout: Tensor) -> Mapping[str, Tensor]:
        drop = dropout < self.caption_dropout_rate
        if not drop.any():
            return batch.prompt
        return {
            name: torch.where(
                drop.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1)), batch.empty_prompt[name], tensor
            )
            for name, tensor in batch.prompt.items()
        }

    def configure_optimizers(self) -> Any:
        assert self.optimizer is not None
        assert self.transformer is not None
        try:
            optimizer = self.optimizer(list(trainable(self.transformer).values()))
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer: {error}") from error
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, keep the norm for the metrics, and leave out a step whose gradient is not finite.

        After a backward pass over several processes the gradients are the same in all, so all of them decide
        alike. Optimizers pass over parameters without a gradient: weights, moments and decay stay as they were.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_norm = gradient_clip_algorithm != "value"
        self.grad_norm = nn.utils.clip_grad_norm_(parameters, (by_norm and gradient_clip_val) or float("inf"))
        window, self._window = self._window, []
        if torch.isfinite(self.grad_norm):
            self.nonfinite_steps = 0
            if gradient_clip_val and not by_norm:
                nn.utils.clip_grad_value_(parameters, gradient_clip_val)
            return
        for parameter in parameters:
            parameter.grad = None
        self.nonfinite_steps += 1
        bad = [key for key, loss in window if not torch.isfinite(loss)]
        samples = f"sample {listing(bad)}" if bad else f"the gradient of {listing([key for key, _ in window])}"
        log.warning(f"step {self.global_step + 1} is not applied: not finite in {samples}")
        if self.nonfinite_steps >= self.max_nonfinite_steps:
            raise UserError(
                f"{self.nonfinite_steps} steps in a row were not finite, the last in {samples}: look at these samples, "
                "lower optimizer.lr, or start again from an earlier checkpoint"
            )

    # Checkpoints: what trains, and nothing else

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.transformer is not None
        names = {f"transformer.{name}" for name in trainable(self.transformer)}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        # An accumulation window that is not finished is taken again from its start.
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counter in (progress["total"], progress["current"]):
            counter.update(dict.fromkeys(counter, batches))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.transformer is not None
        own = {f"transformer.{name}": tensor.shape for name, tensor in trainable(self.transformer).items()}
        stored = {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()}
        if own != stored:
            different = sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name))
            raise UserError(
                f"ckpt_path: the checkpoint's adapter is not this run's; they differ in {listing(different)}. "
                "Use the settings of the run that wrote it (its config.yaml)"
            )

    # Prediction

    def predict_step(self, batch: EditRequest | EncodeRequest, batch_idx: int) -> Any:
        """The latents of a sample, or the pictures of an edit."""
        if isinstance(batch, EncodeRequest):
            return self.encode(batch.raw, empty_prompt=True)
        return self.pictures(batch)

    def pictures(self, batch: EditRequest) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The request's pictures, each (1, 3, H, W) about [-1, 1], with the facts of how it was made."""
        assert self.sampling is not None
        seconds = self.stopwatch.seconds
        seconds["encode_image"] = 0.0
        latents = self.encode(batch.raw)
        prompt = batch.raw.prompts[0]
        for scale, seed in itertools.product(batch.lora_scales, batch.seeds):
            self.set_lora_scale(scale)
            seconds["denoise"] = seconds["decode"] = 0.0
            pixels = self.edit(latents, self.sampling, batch.size, seed)
            marks = [f"_seed{seed}"] if len(batch.seeds) > 1 else []
            marks += [f"_scale{scale:g}"] if len(batch.lora_scales) > 1 else []
            taken = {**seconds, "encode_prompt": self.prompts.seconds[prompt]}
            yield (
                pixels,
                {
                    "name": batch.name + "".join(marks),
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
        """One picture (1, 3, H, W), about [-1, 1], from a batch of one: what the stock pipeline gives for the seed."""
        controls = [self.normalize(control) for control in batch.controls]
        negative = self.prompts([sampling.negative_prompt], self.main_device) if sampling.uses_negative else None
        generator = torch.Generator().manual_seed(seed)
        with self.stopwatch.stage("denoise"):
            latents = self.denoise(controls, batch.prompt, negative, size, sampling, generator)
        with self.stopwatch.stage("decode"):
            return self.decode(latents)

    def provenance(self) -> dict[str, Any]:
        """What a LoRA file's header says of its base."""
        precision = str(self.base_dtype).removeprefix("torch.")
        return {
            "base": self.repository_name,
            "transformer": self.transformer_name,
            "base_precision": precision,
        }
