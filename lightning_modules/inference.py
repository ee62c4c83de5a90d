"""The weights of sample images, validation and LoRA files while a module trains."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from foundation.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.edit_module import EditModule
from lightning_modules.execution.fsdp import gather_anew
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import find_weights


@contextmanager
def averaged_weights(module: EditModule, other: bool = False) -> Iterator[None]:
    """Temporarily replace the trainable parameters by their average, if it is to be sampled with.

    The average is the EMA's, or a schedule-free optimizer's.

    Args:
        other: in a run with an EMA, use the weights that are not sampled with.
    """
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    ema = module.optimization.ema
    with ExitStack() as stack:
        if module.device_mesh is not None:
            gather_anew(module.transformer)
            stack.callback(gather_anew, module.transformer)
        if ema is not None and (ema.sample_with == "ema") != other:
            stack.enter_context(ema.averages_in_place())
        elif hasattr(optimizer, "eval"):
            stack.enter_context(_average_of(optimizer, module.trained.parameters().values()))
        yield


@contextmanager
def _average_of(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Temporarily replace the parameters by a schedule-free optimizer's average."""
    # The optimizer's own way back rounds: saving would change the run.
    originals = {parameter: parameter.data.clone() for parameter in parameters}
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for parameter, data in originals.items():
            parameter.data.copy_(data)


@contextmanager
def inference_weights(module: EditModule) -> Iterator[None]:
    """Temporarily use evaluation mode and the weights as a loader of the file will have them."""
    module.eval()
    with ExitStack() as stack:
        stack.enter_context(averaged_weights(module))
        stack.enter_context(module.execution.for_inference())
        if module.device_mesh is None:  # sharded weights stay as they train
            stack.enter_context(module.trained.in_dtype(module.base.dtype))
        stack.callback(module.train)
        yield


class SamplingTransformer:
    """Another transformer to sample with, for instance the distilled one that the LoRA is meant for.

    It is loaded for each set of sample images, gets the LoRA from its file, and is released. It is quantized, offloaded
    and placed as the transformer that trains, which keeps its memory meanwhile.

    Args:
        module: in training.
        name: folder or hub id of a whole pipeline, or of a transformer only; or a single file.
    """

    def __init__(self, module: EditModule, name: str) -> None:
        self.module = module
        trains = module.base.source
        revision = module.base.revision if name == module.base.name else None
        self.source = replace(trains, name=name, revision=revision)

    def check(self) -> None:
        """Raise a UserError for a transformer that cannot take the LoRA, before any weights are read."""
        adapter, base = self.module.adapter, self.module.base
        setting = f"sampling.transformer_name_or_path={self.source.name}"
        if adapter.trains_base:
            raise UserError(f"{setting}: adapter=full trains no LoRA that another transformer could use")
        if self.module.device_mesh is not None:
            raise UserError(f"{setting}: trainer=fsdp shards one transformer only")
        self.source.check_settings(type(self.module))
        self.module.sampler.check_source(self.source)
        layers = self.module.layers.native
        if LayerNames(self.source.meta, layers).shapes != LayerNames(base.source.meta, layers).shapes:
            raise UserError(f"{setting} has other layers than {base.transformer_name}: a LoRA of one does not fit both")
        self.source.check_files()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Temporarily sample with this transformer."""
        module = self.module
        with module.execution.without_compiling():
            try:
                self._load()
                yield
            finally:
                module.sampler.use(module.transformer, gates=module.rank_gates)
                gc.collect()  # layers and hooks refer to each other
                if module.base.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _load(self) -> None:
        """Load the transformer with the LoRA, by way of its file, into the sampler, which has the only reference."""
        module = self.module
        transformer = self.source.load(module.base.device)
        with TemporaryDirectory() as folder, torch.random.fork_rng(devices=()):  # peft draws what is then replaced
            with averaged_weights(module):
                gathered = module.adapter.gather(module.trained.parts)
            header = {"adapter": module.adapter.metadata()}
            module.adapter.write(Path(folder), gathered, module.base, header, torch.float32)
            loras = AppliedLoRAs([find_weights(folder)])
            loras.load(transformer, module.base)
        module.execution.prepare(transformer)
        module.sampler.use(transformer, self.source, loras.rank_gates)
