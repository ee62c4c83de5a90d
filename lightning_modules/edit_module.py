"""A frozen pipeline with a trainable adapter in its transformer: Lightning's hooks, nothing else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, Self

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from datamodules.base import PromptData
from datamodules.batch import LatentBatch, RawBatch
from datamodules.edits import EditRequest
from datamodules.encoding import EncodeRequest
from datamodules.pairs import PairsDataModule
from foundation.internals import resume_at, trainer_of
from lightning_modules.adapters.adapter import Adapter, TrainedParts
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.gates import RankGate
from lightning_modules.adapters.peft_layers import remove_adapters
from lightning_modules.blocks import blocks
from lightning_modules.denoiser import Denoiser
from lightning_modules.encoder import Encoder
from lightning_modules.execution.execution import Execution
from lightning_modules.family import Family
from lightning_modules.flow import FlowMatching, mix
from lightning_modules.objectives.objective import Objective
from lightning_modules.optimization import Optimization
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.sampling import Sampler
from lightning_modules.settings import ModelSettings

log = logging.getLogger("retouch")

# Key of the training samples' fingerprint in a checkpoint.
SAMPLES = "samples"


class EditModule(L.LightningModule, Family):
    """The shared part of all model families.

    Args:
        adapter, objective, optimization: None in prediction.
        settings: arguments of `ModelSettings`.

    Attributes:
        base: the frozen pipeline. It is not a submodule: Lightning would move and save it.
        transformer: None until it is loaded.
        text_encoders: the trainable text encoders by name.
        adapter, optimization: set in training only.
        objective: in prediction the base class, which demands nothing of the data.
        encoder, flow, denoise, sampler: RawBatch -> LatentBatch -> Noised -> velocities; LatentBatch -> images.
    """

    adapter: Adapter
    optimization: Optimization
    stays_loaded = False  # True: the next prediction uses the loaded weights, with LoRAs of its own
    samples = True  # False: the transformer is not loaded

    def __init__(
        self,
        *,
        adapter: Adapter | None = None,
        objective: Objective | None = None,
        optimization: Optimization | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        model = ModelSettings(**settings)
        self.base = FrozenBase(type(self), model, self._main_device)
        self.geometry = replace(self.geometry, resolution=model.resolution)
        self.max_sequence_length = model.max_sequence_length
        self.training_guidance_scale = model.training_guidance_scale
        self.transformer: Any = None
        self.text_encoders = nn.ModuleDict()
        self.execution = Execution(self, self.base, model, adapter)
        self.denoise = Denoiser(self, self.execution)
        self.encoder = Encoder(self, self.base, model.vae_encode_mode)
        self.flow = FlowMatching(
            model.timesteps, model.vae_encode_mode, model.seed, self.normalize, self._pipeline_shift
        )
        self.objective = objective or Objective()
        if adapter is not None and optimization is not None:
            self.adapter, self.optimization = adapter, optimization
        self.sampler = Sampler(self, self.base, self.encoder, AppliedLoRAs([]), model.sampling)
        # The checkpoint contains the adapter only; on_load_checkpoint compares its keys.
        self.strict_loading = False

    def _main_device(self) -> torch.device:
        return self.trainer.strategy.root_device if trainer_of(self) is not None else self.device

    def _pipeline_shift(self, batch: LatentBatch) -> float:
        return self.base.dynamic_shift(self.geometry.target_tokens(batch))

    @property
    def rank_gates(self) -> list[RankGate]:
        """The gates of T-LoRAs: `Denoiser` opens them in training, `Sampler` in sampling."""
        return self.execution.rank_gates if self.execution.trains else self.sampler.loras.rank_gates

    @property
    def trained(self) -> TrainedParts:
        """The transformer and the trainable text encoders, once they are loaded."""
        return TrainedParts(self.adapter, self.transformer, self.text_encoders)

    # Setup

    def setup(self, stage: str) -> None:
        if stage == "fit":
            data = PairsDataModule.of(self.trainer)
            self.execution.check_data(data)
            self.objective.check_sizes(data.drawn_sizes)
        self.check()
        self.base.check_files()
        if stage == "predict":
            self.base.timer.synchronize = self.base.device
            asked = PromptData.of(self.trainer)
            if self.encoder.prompts.keep(asked.all_prompts(), asked.prompt_images, self.trainer.num_devices):
                self.base.components.release(*self.text_components)

    def check(self) -> None:
        """Raise a UserError for settings that cannot work, before any weights are read."""
        sharded = self.device_mesh is not None
        self.base.check()
        self.execution.check(sharded)
        if self.samples:
            self.sampler.check()
        if self.execution.trains:
            self.optimization.check_optimizer(self.adapter.has_own_rates)
            self.adapter.check(self.base, sharded, self.condition_images.text_sees_them)
            self.objective.check_model(self, self.adapter)

    def configure_model(self) -> None:
        """Load the transformer to train or to sample; can be called twice."""
        if self.transformer is not None and not self.stays_loaded:
            return
        # Lightning makes the trainer's device PyTorch's default: tensors for it are placed explicitly.
        with torch.device("cpu"):
            if self.execution.trains:
                self._load_to_train()
            elif self.samples:
                self.transformer = self.transformer or self.base.load_transformer()
                remove_adapters(self.transformer)
                chosen = self.sampler.sampling.transformer_name_or_path is not None
                self.sampler.loras.load(self.transformer, self.base)
                self.sampler.use(self.transformer, self.base.source if chosen else None, self.rank_gates)
                self.execution.prepare(self.transformer)

    def _load_to_train(self) -> None:
        mesh = None if self.device_mesh is None else self.device_mesh["data_parallel"]
        run, data, passes = trainer_of(self), None, 0
        if run is not None:
            data, passes = PairsDataModule.of(run), run.max_steps * run.accumulate_grad_batches
        forwards = self.objective.needs_base + self.objective.needs_empty_prompt
        self.transformer = self.execution.load_to_train(mesh, data, passes, forwards)
        self.sampler.use(self.transformer, gates=self.rank_gates)
        self.text_encoders = self.execution.text_encoders_to_train()
        self.encoder.trains_text_encoders = len(self.text_encoders) > 0
        # Frozen parameters are equal in all processes, and gloo cannot send float8. Unread ones get no gradient.
        *_, last = blocks(self.transformer)
        unread = tuple(f"transformer.{last}.{name}" for name in self.unread)
        self._ddp_params_and_buffers_to_ignore = [
            name for name, one in self.named_parameters() if not one.requires_grad or name.startswith(unread)
        ]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, except of the text encoders, whose dropout would draw from PyTorch's global generator."""
        super().train(mode)
        self.text_encoders.eval()
        return self

    def on_fit_start(self) -> None:
        if PairsDataModule.of(self.trainer).needs_encoders:
            self.base.load_encoders()

    def cpu(self) -> Self:
        """Release the weights, unless they stay: Lightning's last call in every run would copy them to CPU memory."""
        if self.stays_loaded:
            return self
        self.transformer = None
        self.sampler.use(None)
        self.base.release()
        return super().cpu()

    # The autoencoder of most families, diffusers' AutoencoderKL

    def normalize(self, latents: Tensor) -> Tensor:
        config = self.base.vae_config
        return (latents - config["shift_factor"]) * config["scaling_factor"]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)  # before scaling, as the pipelines round in bf16
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample

    # Training

    def training_step(self, batch: RawBatch | LatentBatch, batch_idx: int) -> dict[str, Any]:
        """Return the loss and, for callbacks, per-sample losses (B,) and token counts."""
        latents = self.encoder.latents(batch, self.objective.needs_empty_prompt)
        noised = self.flow.noised(latents)
        with self._dropout(latents.draws):
            losses = self.objective.losses(latents, noised, self.denoise, self.global_step)
        self.optimization.note(latents.keys, losses.detach())
        return {
            "loss": losses.mean(),
            "losses": losses.detach(),
            "tokens": self.geometry.token_count(latents),
            **({"active_ranks": self.rank_gates[0].active_ranks} if self.rank_gates else {}),
        }

    @contextmanager
    def _dropout(self, draws: list[int]) -> Iterator[None]:
        """Temporarily seed PyTorch's global generators, which peft draws dropout from, by the batch's draws."""
        if not self.adapter.dropout:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(reduce(mix, draws, self.flow.seed))
            yield

    def configure_optimizers(self) -> Any:
        return self.optimization.configure(self.trained, self.device_mesh is not None)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.optimization.before_step(optimizer, self.global_step + 1, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.optimization.after_step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.optimization.is_reported(self.trainer):
            self.optimization.nonfinite.report()

    def on_train_end(self) -> None:
        self.optimization.nonfinite.report()

    # Prediction

    def predict_step(self, batch: EditRequest | EncodeRequest, batch_idx: int) -> Any:
        """Return the latents of a sample, or an iterator over the images of an edit."""
        if isinstance(batch, EncodeRequest):
            return self.encoder.to_cache(batch)
        return self.sampler.generate(batch, lambda: self.trainer.should_stop)

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = self.trained.tensors()
        checkpoint["state_dict"] = {name: one for name, one in checkpoint["state_dict"].items() if name in trained}
        self.optimization.save(checkpoint)
        checkpoint[SAMPLES] = PairsDataModule.of(self.trainer).fingerprint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:  # else the strategy has loaded it
            self.trained.require_same(checkpoint["state_dict"])
        # Resume at the start of an accumulation window of the current length.
        resume_at(checkpoint, checkpoint["global_step"] * self.trainer.accumulate_grad_batches)
        self.optimization.load(checkpoint)
        earlier, now = checkpoint.get(SAMPLES), PairsDataModule.of(self.trainer).fingerprint
        if earlier not in (None, now):
            log.info(f"note: the run had {earlier[0]:,} training samples; these {now[0]:,} are not the same")
