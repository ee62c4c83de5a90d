"""A transformer ready to compute, in order: load, quantize, inject the adapter, compile."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.pairs import PairsDataModule
from foundation.errors import UserError
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.adapters.applied import TrainingAdapter
from lightning_modules.adapters.gates import Gate, RankGate
from lightning_modules.adapters.peft_layers import cast_inputs
from lightning_modules.blocks import cast_inputs_once, repeatable, streamed_blocks
from lightning_modules.execution.attention import check_attention_backend, set_attention_backend
from lightning_modules.execution.checkpointing import read_policy, recomputed, set_checkpointing
from lightning_modules.execution.compilation import SECONDS, Compiled, compile_blocks, compiles, expected_graphs
from lightning_modules.execution.offload import ActivationOffload, BlockStream, all_weights
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.settings import ModelSettings

log = logging.getLogger("retouch")


class Execution:
    """Execution of a base's transformer, in training and in prediction.

    Args:
        adapter: the adapter to train; None in prediction.

    Attributes:
        trains: whether there is an adapter; without one, the attribute `adapter` is not set.
        training_adapter: a frozen LoRA that is active in training steps.
        direction: multiplies the update of single samples by a sign; None until `Denoiser.turned` is used.
        compiles: whether blocks are compiled.
    """

    def __init__(self, family: Family, base: FrozenBase, settings: ModelSettings, adapter: Adapter | None) -> None:
        self.family = family
        self.base = base
        self.trains = adapter is not None
        if adapter is not None:
            self.adapter = adapter
        trains_with = None if adapter is None else settings.training_adapter
        self.training_adapter = None if trains_with is None else TrainingAdapter(trains_with)
        self.checkpointing = read_policy(settings.gradient_checkpointing)
        self.compile = settings.compile
        self.compiles = False
        self._dynamic: bool | None = None
        self.attention_backend = settings.attention_backend
        self.offload = settings.offload
        self.direction: Gate | None = None
        self._activations: ActivationOffload | None = None

    def check(self, sharded: bool) -> None:
        """Raise a UserError for incompatible settings.

        Args:
            sharded: whether the transformer is split over several GPUs.
        """
        check_attention_backend(self.attention_backend, self.trains)
        if not self.trains:
            return
        recomputes = self.checkpointing in ("full", "auto")
        if sharded and self.offload["blocks"]:
            raise UserError("model.offload.blocks: trainer=fsdp splits the blocks instead. Leave one of the two out.")
        if sharded and self.offload["activations"] and not recomputes:
            raise UserError(
                "model.offload.activations with trainer=fsdp needs model.gradient_checkpointing=full, else the weights "
                "gathered for a step would be offloaded as well"
            )
        if self.offload["blocks"] and not recomputes:
            raise UserError("model.offload.blocks needs model.gradient_checkpointing=full: it frees a block's copy")
        if self.training_adapter is not None:
            self.training_adapter.check(self.base, self.adapter)
        else:
            self.base.note_distilled()

    def check_data(self, data: PairsDataModule) -> None:
        """Raise a UserError for data that the adapter cannot train on."""
        if self.adapter.trains_text_encoders and not data.training.captions:
            raise UserError("adapter.text_encoders=true needs the prompts: give data.root in place of data.shards")

    def load_to_train(self, mesh: Any, data: PairsDataModule | None, passes: int, forwards: int) -> Any:
        """Load the transformer with its adapter, ready to train.

        Args:
            mesh: the GPUs that it is split over; None if each process has the whole transformer.
            data: to compile for; None if unknown.
            passes: forward and backward passes of the run.
            forwards: kinds of its passes without gradient.
        """
        self.direction = None
        transformer = self.base.load_transformer(sharded=mesh is not None)
        self.adapt(transformer)
        if self.training_adapter is not None:
            self.training_adapter.load(transformer, self.base)
        if self.offload["activations"]:
            self._activations = ActivationOffload(self.base.device, all_weights(transformer))
        self.prepare(transformer)
        if self.compile and data is not None:
            self._dynamic = not data.is_uniform(partial(self.family.prompt_shapes, self.base.source.config()))
        graphs = expected_graphs(transformer, not self._dynamic, forwards)
        self.compiles = compiles(self.compile, self.base.device, passes, graphs)
        if self.compiles:
            took = f"about {SECONDS * graphs} s in all, less in later runs"
            log.info(f"compiling the transformer's blocks during the first steps: about {graphs} graphs, {took}")
        policy = "full" if self.checkpointing == "auto" else self.checkpointing
        self.set_checkpointing(transformer, policy, is_final=not self.searches_checkpointing)
        if mesh is not None:
            from lightning_modules.execution.fsdp import shard

            shard(transformer, mesh)
            cast_inputs(transformer, True)  # it also samples images, in float32 and without autocast
        return transformer

    def adapt(self, transformer: Any) -> None:
        """Inject the adapter and prepare the transformer for training; it may be on the meta device."""
        self.adapter.inject(transformer, self.family.layers)
        cast_inputs_once(transformer)

    def adapted_meta_transformer(self) -> Any:
        """Return the transformer with its adapter on the meta device, for estimates."""
        transformer = deepcopy(self.base.source.meta)
        self.adapt(transformer)
        return transformer

    def text_encoders_to_train(self) -> nn.ModuleDict:
        """Return the text encoders with the adapter, by name; none if it does not train them."""
        found = nn.ModuleDict()
        for name in self.base.family_class.text_components if self.adapter.trains_text_encoders else ():
            if isinstance(part := self.base.components[name], nn.Module):
                self.adapter.inject(part)
                found[name] = part.eval()
        return found

    def prepare(self, transformer: Any) -> None:
        """Move the transformer to its device, set its kernels, and compile it for prediction if configured.

        Quantization and adapters must be in place.

        Raises:
            UserError: this machine or these weights do not support it.
        """
        if self.offload["blocks"]:  # they move to the device when they compute, everything else now
            blocks = streamed_blocks(transformer, self.offload["blocks"])
            BlockStream(list(blocks.values()), self.base.device)
            transformer.to(self.base.device)
        # Positions are plain attributes of diffusers' modules, which .to() does not move: each forward would copy them,
        # and wait for the GPU.
        for module in transformer.modules():
            tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
            vars(module).update({name: tensor.to(self.base.device) for name, tensor in tensors.items()})
        set_attention_backend(transformer, self.attention_backend, self.base.device)
        if not self.trains and compiles(self.compile, self.base.device, 0, 1):
            compile_blocks(transformer, None, "none", self.recomputed)

    @property
    def rank_gates(self) -> list[RankGate]:
        """The rank gates of the trained adapter, if it is a T-LoRA."""
        gate = self.adapter.rank_gate if self.trains else None
        return [] if gate is None else [gate]

    @property
    def searches_checkpointing(self) -> bool:
        """Whether the first steps find how little the memory allows to compute again."""
        waits = self.offload["blocks"] or self.offload["activations"]
        return self.checkpointing == "auto" and self.base.device.type == "cuda" and not waits

    def recomputed(self, run: Callable[..., Any], policy: str) -> Callable[..., Any]:
        """Return a function that computes a block again as at first: with its rank mask, signs, kernels and dropout."""
        gates = [*self.rank_gates, *([] if self.direction is None else [self.direction])]
        again = repeatable(run, *((gate, "factors") for gate in gates), (Compiled, "fails"))
        return recomputed(again, policy, draws=self.adapter.dropout > 0)

    def set_checkpointing(self, transformer: Any, policy: str, is_final: bool = True) -> None:
        """Make the following steps keep what this policy says, and compile the blocks if it is the final one."""
        compiles = self.compiles and is_final
        # Recomputed in their graphs, except streamed blocks, whose weights are not there in the backward pass.
        in_graphs = policy if compiles and not self.offload["blocks"] else "none"
        set_checkpointing(transformer, policy if in_graphs == "none" else "none", self.recomputed)
        if compiles:
            compile_blocks(transformer, self._dynamic, in_graphs, self.recomputed)

    def saved_tensors(self) -> AbstractContextManager[Any]:
        """Temporarily offload the tensors that autograd saves, if configured; around a training step's forward."""
        return self._activations or nullcontext()

    def without_compiling(self) -> AbstractContextManager[Any]:
        """Temporarily run compiled blocks eagerly: graphs are for training steps, sampled images have other sizes."""
        return torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()

    @contextmanager
    def for_inference(self) -> Iterator[None]:
        """Temporarily run the transformer as in prediction: eagerly, without the training adapter."""
        assistant = self.training_adapter
        with self.without_compiling(), assistant.left_out(self.family.transformer) if assistant else nullcontext():
            yield
