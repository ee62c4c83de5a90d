"""What all model families share in training: noise -> velocity -> loss, and what a checkpoint holds."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from datamodules.batch import Batch, LatentBatch, RawBatch, copy_to, pad_to
from datamodules.errors import UserError, listing
from lightning_modules import flow
from lightning_modules.adapters.adapter import Adapter, trainable
from lightning_modules.adapters.lora import cast_inputs, whole
from lightning_modules.estimation.flops import StepFlops, tokens_of
from lightning_modules.execution.activation_offload import ActivationOffload
from lightning_modules.execution.autocast import cast_inputs_once
from lightning_modules.execution.checkpointing import read_position, set_checkpointing
from lightning_modules.execution.kernels import check_attention_backend
from lightning_modules.execution.last_block import unread_parameters
from lightning_modules.optimization import NonfiniteSteps
from lightning_modules.quantization.quantization import all_weights
from lightning_modules.sampling import Predictor

log = logging.getLogger("retouch")


class EditModule(Predictor):
    """A frozen pipeline with a trainable adapter in its transformer.

    Args:
        gradient_checkpointing: what is computed again in the backward pass, to save memory: `none`, `selective`,
            `every_N` (every N-th block), `full` or `auto`.
        timesteps: the distribution of training timesteps.
        max_nonfinite_steps: stop after so many steps in a row whose gradient is not finite.
        adapter: what trains; None in prediction.
        optimizer: called with the trainable parameters.
        scheduler: called with the optimizer; counts optimizer steps.
        pipeline: of `Predictor` and `FrozenPipeline`.
    """

    def __init__(
        self,
        gradient_checkpointing: bool | str,
        timesteps: flow.TimestepLaw,
        max_nonfinite_steps: int,
        seed: int,
        adapter: Adapter | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None = None,
        **pipeline: Any,
    ) -> None:
        super().__init__(**pipeline)
        self.gradient_checkpointing = read_position(gradient_checkpointing)
        self.timesteps = timesteps
        self.caption_dropout_rate = 0.0  # the data's, from `setup` on
        self.activation_offload: ActivationOffload | None = None
        self.nonfinite = NonfiniteSteps(max_nonfinite_steps)
        self.seed = seed
        self.adapter = adapter
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.text_encoders = nn.ModuleDict()  # those that train
        self.grad_norm: Tensor | None = None
        self.batch_tokens = 0
        self.batch_flops = 0
        self._flops: StepFlops | None = None
        self.batch_loss = torch.zeros(())
        self.batch_rank: Tensor | None = None  # the mean active rank, where the rank follows the timestep
        # The checkpoint holds the adapter only; on_load_checkpoint compares its keys.
        self.strict_loading = False

    def setup(self, stage: str) -> None:
        if stage == "fit":
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self._check_precision()
            if self.device_mesh is not None and self.offload["blocks"]:
                raise UserError("model.offload.blocks does not go with trainer=fsdp, which splits them instead")
            if self.device_mesh is not None and self.offload["activations"] and self.gradient_checkpointing != "full":
                raise UserError(
                    "model.offload.activations with trainer=fsdp needs model.gradient_checkpointing=full: else the "
                    "weights that are gathered for a step would be copied, too"
                )
            if self.adapter is not None and self.adapter.trains_text_encoders and not data.knows_prompts:
                raise UserError("adapter.text_encoders=true needs the prompts: give data.root in place of data.shards")
            self.caption_dropout_rate = data.caption_dropout_rate
        super().setup(stage)

    def preflight(self) -> None:
        super().preflight()
        if self.adapter is not None:
            if self.offload["blocks"] and self.gradient_checkpointing != "full":
                raise UserError("model.offload.blocks needs model.gradient_checkpointing=full: it frees a block's copy")
            check_attention_backend(self.attention_backend, trains=True)
            self.adapter.preflight(self)

    def _check_precision(self) -> None:
        needed = "32-true" if self.base_dtype == torch.float32 else "bf16-mixed"
        if self.trainer.precision != needed:
            raise UserError(
                f"trainer.precision={self.trainer.precision} does not go with model.dtype={str(self.base_dtype)[6:]}: "
                f"use {needed}, which keeps what trains in float32"
            )

    def build(self) -> None:
        if self.adapter is None or self.transformer is not None:
            super().build()
            return
        transformer = self.load_transformer()
        self.adapt(transformer)
        self.rank_gates = self.adapter.rank_gates()
        self.transformer = transformer
        if self.offload["activations"]:
            self.activation_offload = ActivationOffload(self.main_device, all_weights(transformer))
        self.stream_blocks()
        self.prepare_blocks(dynamic=self._sizes_differ() if self.compiles else None)
        if self.gradient_checkpointing != "auto":
            self.set_gradient_checkpointing(transformer, self.gradient_checkpointing)
        if self.adapter.trains_text_encoders:
            self._train_text_encoders()
        if self.device_mesh is not None:
            from lightning_modules.execution.fsdp import shard

            shard(transformer, self.device_mesh["data_parallel"])
            cast_inputs(transformer, True)  # in float32 and without autocast it makes pictures too
        # DDP: what never changes is the same in all processes, and float8 does not travel by gloo.
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        unread = [f"transformer.{name}" for name in unread_parameters(transformer)]
        self._ddp_params_and_buffers_to_ignore = [*frozen, *unread]

    def adapt(self, transformer: Any) -> None:
        """Make of a frozen transformer one that trains."""
        assert self.adapter is not None
        self.adapter.inject(transformer)
        self.cut_last_block(transformer)
        cast_inputs_once(transformer)

    def meta_as_it_trains(self) -> Any:
        """A transformer without weights, but with an adapter."""
        transformer = deepcopy(self.meta_transformer())
        self.adapt(transformer)
        return transformer

    @contextmanager
    def with_transformer(self, transformer: nn.Module) -> Iterator[None]:
        """Inside, this one is in place of the module's own."""
        present, self.transformer = self.transformer, transformer
        try:
            yield
        finally:
            self.transformer = present

    def _train_text_encoders(self) -> None:
        """Let those in use be trained and saved with the transformer."""
        assert self.adapter is not None
        for name in self.text_components:
            if isinstance(part := self.components[name], nn.Module):
                self.adapter.inject(part)
                part.eval()
                self.text_encoders[name] = part

    def train(self, mode: bool = True) -> Self:
        """But for the text encoders, whose dropout would draw from PyTorch's global generator."""
        super().train(mode)
        self.text_encoders.eval()
        return self

    def trained_parts(self) -> dict[str, nn.Module]:
        """The transformer, and what trains beside it, by their names in the repository."""
        assert self.transformer is not None
        return {"transformer": self.transformer, **dict(self.text_encoders.items())}

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What trains, by name."""
        assert self.transformer is not None
        return trainable(self.transformer) | trainable(self.text_encoders)

    def set_gradient_checkpointing(self, transformer: Any, position: str) -> None:
        """Turn the dial of a diffusers model, as the adapter needs it; any position but auto."""
        assert self.adapter is not None
        set_checkpointing(transformer, position, self.adapter.as_now, self.compiles)

    def _sizes_differ(self) -> bool | None:
        """Whether the batches of the run do; None where there is no run."""
        return None if self._trainer is None else not self._trainer.datamodule.is_uniform(self)  # type: ignore[attr-defined]

    def on_fit_start(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.needs_encoders:
            for name in (*self.text_components, "vae"):
                self.components[name]
                self.rest_components()
        if self.gradient_checkpointing == "auto":
            from tasks.footprint import choose_checkpointing

            self.gradient_checkpointing = choose_checkpointing(self, data)
            self.set_gradient_checkpointing(self.transformer, self.gradient_checkpointing)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, Batch) else super().transfer_batch_to_device(batch, device, 0)

    # Training

    def training_step(self, batch: RawBatch | LatentBatch, batch_idx: int) -> Tensor:
        latents = (
            self.encode(batch, "" if self.caption_dropout_rate > 0 else None) if isinstance(batch, RawBatch) else batch
        )
        assert self.adapter is not None
        latents = self.with_texts(latents)
        if self.adapter.dropout > 0:  # peft draws it from PyTorch's global generator
            torch.manual_seed(flow.mix(flow.mix(self.seed, latents.draws[0]), 0))
        losses = self.losses(latents)
        for gate in self.rank_gates:
            assert gate.active_ranks is not None
            self.batch_rank = gate.active_ranks.float().mean()
        self.nonfinite.note(latents.keys, losses.detach())
        self.batch_tokens = self.token_count(latents)
        self.batch_flops = self.useful_flops(latents)
        self.batch_loss = losses.detach().mean()
        return losses.mean()

    def useful_flops(self, batch: LatentBatch) -> int:
        """Of the transformer, in a step with this batch."""
        if self._flops is None:
            self._flops = StepFlops(self, self.meta_as_it_trains())
        return len(batch.keys) * self._flops(tokens_of(batch))

    def with_texts(self, batch: LatentBatch) -> LatentBatch:
        """The batch with the conditioning that text encoders in training give now; where none train, as it is."""
        if not self.text_encoders:
            return batch
        empty = self.encode_prompts([""]) if batch.empty_prompt else {}
        return replace(batch, prompt=self.encode_prompts(batch.prompts), empty_prompt=empty)

    def losses(self, batch: LatentBatch) -> Tensor:
        """Each sample's flow-matching loss (B,), its randomness drawn from (seed, draw number)."""
        assert batch.target_mean is not None
        shape = batch.target_mean.shape[1:]
        return self.losses_at(
            batch, flow.draw(self.seed, batch.draws, shape, self.timesteps, self.dynamic_shift(shape))
        )

    def losses_at(self, batch: LatentBatch, drawn: flow.Draw) -> Tensor:
        """Each sample's flow-matching loss (B,) at these timesteps, with this noise."""
        mean = batch.target_mean
        assert mean is not None
        t, eps = copy_to(drawn.t, mean.device), copy_to(drawn.eps, mean.device)
        target = mean.float()
        if self.vae_encode_mode == "sample":
            assert batch.target_std is not None
            target = target + batch.target_std.float() * copy_to(drawn.latent_eps, mean.device)
        x0 = self.normalize(target)
        controls = [self.normalize(control.float()) for control in batch.controls]
        prompt = self._drop_captions(batch, drawn.dropout)
        with self.activation_offload or nullcontext():
            velocity = self.velocity(flow.interpolate(x0, eps, t), t, controls, prompt)
        return flow.flow_loss(velocity, flow.velocity_target(x0, eps), batch.mask)

    def _drop_captions(self, batch: LatentBatch, dropout: Tensor) -> Mapping[str, Tensor]:
        drop = dropout < self.caption_dropout_rate
        if not drop.any():
            return batch.prompt
        if drop.all():
            return {name: empty.expand(len(drop), *empty.shape[1:]) for name, empty in batch.empty_prompt.items()}
        mixed = {}
        for name, tensor in batch.prompt.items():
            empty = batch.empty_prompt[name]
            longest = max(tensor.shape[1], empty.shape[1])
            chosen = copy_to(drop, tensor.device).view(-1, *[1] * (tensor.ndim - 1))
            mixed[name] = torch.where(chosen, pad_to(empty, longest), pad_to(tensor, longest))
        return mixed

    def configure_optimizers(self) -> Any:
        assert self.optimizer is not None
        assert self.transformer is not None
        try:
            optimizer = self.optimizer(list(self.trained_parameters().values()))
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer: {error}") from error
        library = type(optimizer).__module__.partition(".")[0]
        if self.device_mesh is not None and library not in ("torch", "schedulefree"):
            raise UserError(
                f"trainer=fsdp does not go with {type(optimizer).__name__}, which wants whole weights: use "
                "optimizer=adamw or adamw_schedule_free"
            )
        if hasattr(optimizer, "train"):  # a schedule-free one
            optimizer.train()
        lr = optimizer.param_groups[0]["lr"]
        finds_its_own = "d" in optimizer.param_groups[0]
        if self.source.precision in ("fp4", "nf4") and lr > 5e-5 and not finds_its_own:
            log.warning(f"note: optimizer.lr={lr:g} may diverge on a base of 4 bits; 2e-5 was stable")
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
        """Clip, keep the norm for the metrics, and leave out a step whose gradient is not finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_norm = gradient_clip_algorithm != "value"
        self.grad_norm = whole(nn.utils.clip_grad_norm_(parameters, (by_norm and gradient_clip_val) or float("inf")))
        if gradient_clip_val and not by_norm:
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        self.nonfinite.before_step(optimizer, self.global_step + 1, self.grad_norm)
        assert self.adapter is not None
        assert self.transformer is not None
        self.adapter.before_step(optimizer, self.transformer)

    def reads_back(self) -> bool:
        """Whether what this step left on the device is read at its end: not in each, for that waits for the device."""
        step, trainer = self.global_step, self.trainer
        first = step == self._first_step + 1
        return first or step % trainer.log_every_n_steps == 0 or step == trainer.max_steps  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        self._first_step = self.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads_back():
            self.nonfinite.report()

    def on_train_end(self) -> None:
        self.nonfinite.report()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the adapter has the weights to use: those that train, or a schedule-free optimizer's average."""
        assert self.transformer is not None
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        if not hasattr(optimizer, "eval"):
            yield
            return
        # Its own way back rounds: a saving would change the run.
        originals = {parameter: parameter.data.clone() for parameter in self.trained_parameters().values()}
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()
            for parameter, data in originals.items():
                parameter.data.copy_(data)

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Inside, in evaluation mode and with the weights as a loader will have them, for pictures and validation."""
        assert self.adapter is not None
        self.eval()
        with ExitStack() as stack:
            stack.enter_context(self.averaged_weights())
            if self.compiles:  # graphs are for steps
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # Those that are split over processes stay as they train.
            for part in self.trained_parts().values() if self.device_mesh is None else ():
                stack.enter_context(self.adapter.in_dtype(part, self.base_dtype))
            stack.callback(self.train)
            yield

    # Checkpoints: what trains, and nothing else

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = self._checkpoint_tensors()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        # An accumulation window that is not finished is taken again from its start.
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counter in (progress["total"], progress["current"]):
            counter.update(dict.fromkeys(counter, batches))

    def _checkpoint_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by its names in this module."""
        assert self.adapter is not None
        assert self.transformer is not None
        parts = {"transformer": self.transformer} | {
            f"text_encoders.{k}": part for k, part in self.text_encoders.items()
        }
        return {f"{at}.{name}": t for at, part in parts.items() for name, t in self.adapter.tensors(part).items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:  # else the strategy has loaded it
            self.check_checkpoint(checkpoint["state_dict"])

    def check_checkpoint(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise a UserError for the tensors of another adapter."""
        own = {name: tensor.shape for name, tensor in self._checkpoint_tensors().items()}
        stored = {name: tensor.shape for name, tensor in state_dict.items()}
        if own != stored:
            different = sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name))
            raise UserError(
                f"ckpt_path: the checkpoint's adapter is not this run's; they differ in {listing(different)}. "
                "Use the settings of the run that wrote it (its config.yaml)"
            )
