"""The base of LoRA, LoKr and LoHa: deltas of a transformer's linear layers, trained next to frozen weights."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError, listing
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.adapters.peft_layers import ADAPTER, layer_of
from lightning_modules.adapters.targets import last_match, require_matches, resolve_targets
from lightning_modules.family import ALIKE, Layers
from lightning_modules.lora_files import writing
from lightning_modules.lora_files.compatibility import IN_DIFFUSERS, loading_call, readers
from lightning_modules.lora_files.delta import Delta
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import WEIGHTS_NAME, LoRAFile, find_or_download
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import EMBEDDED


class DeltaAdapter(Adapter):
    """An adapter of linear layers.

    Args:
        target_modules: as for `resolve_targets`.
        init_from: weights of the same kind to start from (a run's folder, a weights folder or a file).
        lr_pattern: factors of the learning rate by patterns of layers; the last match applies.
        seed: seed of the random half of the weights.

    Attributes:
        kind: kind of its deltas, as `Delta.kind`.
        starts_from: kinds that `init_from` may have; empty: only its own.
    """

    folder = "lora"
    kind: str
    starts_from: tuple[str, ...] = ()

    def __init__(
        self,
        target_modules: Sequence[str] | str | None,
        init_from: str | None,
        lr_pattern: Mapping[str, float] | None,
        seed: int,
    ) -> None:
        self.target_modules = target_modules if isinstance(target_modules, str | None) else list(target_modules)
        self.init_from = None if init_from is None else find_or_download(init_from)
        self.lr_pattern = {str(key): value for key, value in (lr_pattern or {}).items()}
        self.has_own_rates = bool(self.lr_pattern)
        self.seed = seed

    def check(self, base: FrozenBase, sharded: bool, text_sees_images: bool) -> None:
        if self.init_from:
            file = LoRAFile(self.init_from)
            file.match(base.layer_names, base.name)
            self.check_start(file)
        transformer: Any = base.source.meta
        targets = self.resolve_targets(transformer, base.family_class.layers)
        self.check_targets({name: transformer.get_submodule(name) for name in targets})
        require_matches("adapter.lr_pattern", self.lr_pattern, targets)

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        """Freeze the transformer and add trainable deltas to its targets, with initial weights drawn by the seed."""
        transformer.requires_grad_(False)
        if self.target_modules is None:
            self.target_modules = list(layers.targets)
        targets = self.resolve_targets(transformer, layers)
        with torch.device("cpu"):
            self.put(transformer, targets)
        transformer.train()
        if self.init_from is not None:
            file, names = LoRAFile(self.init_from), LayerNames(transformer, layers.native)
            self.check_start(file)
            deltas = file.read(names, type(transformer).__name__)
            if different := [name for name in names.shapes if (name in deltas) != (name in targets)]:
                raise UserError(
                    f"adapter.init_from={file.path} adapts other layers than adapter.target_modules: "
                    f"{listing(different)}"
                )
            with torch.no_grad():
                for name, layer in self.layers(transformer).items():
                    self.load(layer, name, deltas[name], file)

    @abstractmethod
    def put(self, transformer: nn.Module, targets: Sequence[str]) -> None:
        """Add initial deltas to layers, in float32."""

    @abstractmethod
    def load(self, layer: Any, name: str, delta: Any, file: LoRAFile) -> None:
        """Copy a delta of init_from's file into a layer's own, rescaled if their scale differs."""

    @abstractmethod
    def layers(self, transformer: nn.Module) -> Mapping[str, Any]:
        """Return the adapted layers by name."""

    @abstractmethod
    def delta(self, layer: Any) -> Delta:
        """Return a layer's trained delta without the layer's scale and without gradient; all processes take part."""

    @abstractmethod
    def use(self, layer: Any, delta: Any) -> None:
        """Compute with another delta; None ends it where `Adapter.in_dtype` does not."""

    @torch.no_grad()
    def deltas(self, transformer: nn.Module) -> dict[str, Delta]:
        """Copy each layer's trained delta to the CPU; all processes take part."""
        return {
            name: self.delta(layer).to(torch.float32, "cpu", copy=True).scaled(layer.scaling[ADAPTER])
            for name, layer in self.layers(transformer).items()
        }

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Temporarily cast the weights as a loader does, with the scale in them as in the file."""
        layers = self.layers(part).values()
        scales = [layer.scaling[ADAPTER] for layer in layers]
        deltas = [self.delta(layer).scaled(scale).to(dtype) for layer, scale in zip(layers, scales, strict=True)]
        with super().in_dtype(part, dtype):
            for layer, delta in zip(layers, deltas, strict=True):
                layer.scaling[ADAPTER] = 1.0
                self.use(layer, delta)
            try:
                yield
            finally:
                for layer, scale in zip(layers, scales, strict=True):
                    layer.scaling[ADAPTER] = scale
                    self.use(layer, None)

    def check_start(self, file: LoRAFile) -> None:
        """Raise a UserError if init_from has another kind of adapter."""
        kind = common_kind(file.empty.values())
        if kind not in (self.starts_from or (self.kind,)):
            raise UserError(f"adapter.init_from={file.path} is a {kind}: choose adapter={kind.lower()}")

    def check_targets(self, linears: Mapping[str, nn.Linear]) -> None:
        """Raise a UserError for layers that do not fit the settings."""

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        """Return the names of the layers to adapt; raises UserError if a setting matches no linear layer."""
        return resolve_targets(transformer, layers, self.target_modules)

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in part.state_dict().items() if f".{ADAPTER}." in name}

    def lr_factor(self, name: str) -> float:
        return last_match(self.lr_pattern, layer_of(name), 1.0)

    def gather(self, parts: Mapping[str, nn.Module]) -> Mapping[str, Delta]:
        return self.deltas(parts["transformer"])

    def write(
        self, folder: Path, gathered: Any, base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        writing.write(folder / WEIGHTS_NAME, gathered, header, dtype, names=base.layer_names)

    def check_written(self, folder: Path, base: FrozenBase) -> str:
        pipeline_name = base.family_class.pipeline_name
        found = readers(folder / WEIGHTS_NAME, "diffusers", base.layer_names, pipeline_name, base.source.meta)
        found = [one for one in found if one.program != "ComfyUI" or base.name != EMBEDDED]  # which ComfyUI lacks
        ways = {one.program: one.verdict.partition(": ")[2] for one in found if one.reads}
        read_by = " and ".join(f"{name} ({way})" if "adapter" in way else name for name, way in ways.items())
        others = [f"{one.program} {one.verdict}" for one in found if not one.reads]
        return "; ".join([f"it loads in {read_by}"] * bool(read_by) + others)

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"lora": run}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        if self.kind not in IN_DIFFUSERS:
            return [
                "from lightning_modules.adapters.applied import load_adapter",
                f"load_adapter(pipe.transformer, {weights!r})",
            ]
        return [loading_call(pipeline_name, self.kind, weights=repr(weights))]

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        layers = {layer_of(name) for name in trained}
        return f"{self}: {len(layers)} layers, {sum(tensor.numel() for tensor in trained.values()):,} parameters"

    def metadata(self) -> dict[str, Any]:
        return {"target_modules": self.target_modules}
