"""Pictures by another transformer than the one that trains: the distilled one that the LoRA is meant for."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from datamodules.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.formats.find import find_weights
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.rank_mask import mask_forwards
from lightning_modules.edit_module import EditModule
from lightning_modules.optimization import averaged_weights
from lightning_modules.pretrained.transformer import TransformerSource


class PictureTransformer:
    """Comes with each set of sample pictures, gets the LoRA as its file would have it, and goes again.

    It is quantized, offloaded and placed as the transformer that trains, which keeps its memory meanwhile.

    Args:
        module: in training.
        name: folder or hub id of a whole pipeline, or of nothing but the transformer.
    """

    def __init__(self, module: EditModule, name: str) -> None:
        self.module = module
        base = module.base
        trains = base.source
        revision = base.revision if name == base.name else None
        self.source = TransformerSource(
            trains.class_name, name, revision, trains.dtype, trains.quantization, trains.streamed
        )

    def check(self) -> None:
        """Raise a UserError for a transformer that cannot take the LoRA, before any weights are read."""
        adapter, base = self.module.adapter, self.module.base
        assert adapter is not None
        setting = f"sampling.transformer_name_or_path={self.source.name}"
        if adapter.trains_base:
            raise UserError(f"{setting} does not go with adapter=full: there is no LoRA that another transformer takes")
        if self.module.device_mesh is not None:
            raise UserError(f"{setting} does not go with trainer=fsdp, which splits one transformer alone")
        self.source.check_class(type(self.module).__name__)
        self.source.check()
        self.module.sampler.check_source(self.source)
        layers = self.module.layers.native
        if LayerNames(self.source.meta, layers).sides != LayerNames(base.source.meta, layers).sides:
            raise UserError(f"{setting} has other layers than {base.transformer_name}: a LoRA of one does not fit both")
        self.source.check_files()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the module's sampler makes pictures with it."""
        module = self.module
        with module.execution.without_compiling():
            try:
                module.sampler.use(self._load(), self.source)
                yield
            finally:
                module.sampler.use(module.transformer)
                gc.collect()  # layers and hooks know each other
                if module.base.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _load(self) -> Any:
        """The transformer with what is trained, put into it by way of its file."""
        module = self.module
        assert module.adapter is not None
        transformer = self.source.load(module.base.device)
        with TemporaryDirectory() as folder, torch.random.fork_rng(devices=()):  # peft draws what it then replaces
            with averaged_weights(module):
                write = module.trained.export(module.base, {"adapter": module.adapter.metadata()}, torch.float32)
            write(Path(folder))
            loras = AppliedLoRAs([find_weights(folder)])
            loras.load(transformer, module.base)
        module.execution.prepare(transformer)
        if loras.rank_gates:
            mask_forwards(transformer, loras.rank_gates, lambda *_: module.sampler.current_step())
        return transformer
