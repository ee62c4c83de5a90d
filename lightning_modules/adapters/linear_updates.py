"""What LoRA, LoKr, LoHa and OFT share: updates of a transformer's linear layers that train beside frozen weights."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.adapter import Adapter, Training, require_own_rates
from lightning_modules.adapters.formats.checked import loading_code, read_back
from lightning_modules.adapters.formats.find import WEIGHTS_NAME, find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.low_rank import relative_change
from lightning_modules.adapters.peft_layers import adapter_tensors, layer_of
from lightning_modules.adapters.targets import as_names, last_match, require_matches, resolve_targets
from lightning_modules.adapters.update import Update
from lightning_modules.layers import ALIKE, Layers
from lightning_modules.pretrained.frozen_base import FrozenBase

log = logging.getLogger("retouch")

# Layers by which rounding is measured: of updates that are no LoRA each takes a matrix as large as the weight.
MEASURED = 8


class LinearUpdates(Adapter):
    """Updates of linear layers.

    Args:
        target_modules, layers: of `resolve_targets`; its `within`.
        init_from: weights of the same kind to start from (a run's folder, a weights folder or a file).
        lr_pattern: factors of the learning rate by patterns of layers; the last one that matches holds.
        seed: of the random half of the weights.

    Attributes:
        kind: of its updates, as `Update.kind`.
    """

    folder = "lora"
    kind: str

    def __init__(
        self,
        target_modules: Sequence[str] | str | None,
        layers: Sequence[str] | None,
        init_from: str | None,
        lr_pattern: Mapping[str, float] | None,
        seed: int,
    ) -> None:
        self.target_modules = target_modules if isinstance(target_modules, str | None) else list(target_modules)
        self.layers = as_names(layers)
        self.init_from = None if init_from is None else find_or_download(init_from)
        self.lr_pattern = {str(key): value for key, value in (lr_pattern or {}).items()}
        self.seed = seed
        self._told_of_rounding = False

    def check(self, base: FrozenBase, training: Training) -> None:
        if self.init_from:
            file = LoRAFile(self.init_from)
            file.check(LayerNames.of(base), base.name)
            self.check_start(file)
        transformer: Any = base.source.meta
        targets = self.resolve_targets(transformer, base.family_class.layers)
        self.check_targets({name: transformer.get_submodule(name) for name in targets})
        require_matches("adapter.lr_pattern", self.lr_pattern, targets)
        if training.optimizer is not None and self.has_own_rates:
            require_own_rates(training.optimizer)

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        """Freeze the transformer and put trainable updates beside its targets.

        The initial weights are a function of the seed, whatever the device.

        Raises:
            UserError: target_modules matches nothing, or init_from fits another model.
        """
        transformer.requires_grad_(False)
        if self.target_modules is None:
            self.target_modules = list(layers.targets)
        with torch.device("cpu"):
            self.put(transformer, self.resolve_targets(transformer, layers))
        transformer.train()
        if self.init_from is not None:
            self.load(transformer, LayerNames(transformer, layers.native))

    @abstractmethod
    def put(self, transformer: nn.Module, targets: Sequence[str]) -> None:
        """Put new updates beside layers, in float32."""

    @abstractmethod
    def load(self, transformer: nn.Module, names: LayerNames) -> None:
        """Copy init_from's weights into the updates; those of another scale are rescaled.

        Raises:
            UserError: layers or shapes differ.
        """

    def check_start(self, file: LoRAFile) -> None:
        """Raise a UserError for weights that are of another kind of adapter."""
        kind = kind_of(file.empty.values())
        if kind != self.kind:
            raise UserError(f"adapter.init_from={file.path} is a {kind}: choose adapter={kind.lower()}")

    def check_targets(self, linears: Mapping[str, nn.Linear]) -> None:
        """Raise a UserError for layers that the settings do not fit."""

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        """The names of the layers to adapt; raises UserError where a setting matches no linear layer."""
        return resolve_targets(transformer, layers, self.target_modules, self.layers)

    def read_start(self, adapted: Mapping[str, Any], names: LayerNames, transformer: str) -> dict[str, Update]:
        """The updates of init_from, of the layers that are adapted.

        Raises:
            UserError: it is of other layers, or another kind.
        """
        assert self.init_from is not None
        file = LoRAFile(self.init_from)
        self.check_start(file)
        updates = file.read(names, transformer)
        if updates.keys() != adapted.keys():
            different = [name for name in names.sides if (name in updates) != (name in adapted)]
            raise UserError(
                f"adapter.init_from={file.path} adapts other layers than adapter.target_modules: {listing(different)}"
            )
        return updates

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return adapter_tensors(part)

    @abstractmethod
    def updates(self, transformer: nn.Module) -> Mapping[str, Update]:
        """Copies of what it has learned, of each layer, in the host's memory; all processes take part."""

    @property
    def has_own_rates(self) -> bool:
        """Whether parameters learn at different rates."""
        return bool(self.lr_pattern)

    def lr_factor(self, name: str) -> float:
        return last_match(self.lr_pattern, layer_of(name), 1.0)

    def export(
        self, parts: Mapping[str, nn.Module], base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> Callable[[Path], None]:
        updates = self.updates(parts["transformer"])
        if dtype != torch.float32 and not self._told_of_rounding:
            self._told_of_rounding = True
            some = dict(list(updates.items())[:MEASURED])
            change = relative_change(some, {name: one.to(dtype) for name, one in some.items()})
            if math.isfinite(change):
                log.info(f"export.dtype={str(dtype)[6:]}: rounding changes the update by about {change:.2%}")
        return lambda folder: save_lora(updates, folder / WEIGHTS_NAME, header, dtype)

    def check_exported(self, folder: Path, base: FrozenBase) -> str:
        names = LayerNames.of(base)
        return read_back(folder / WEIGHTS_NAME, names, base.family_class.pipeline_name, base.source.meta)

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"lora": run}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        return loading_code(weights, pipeline_name, self.kind)

    def metadata(self) -> dict[str, Any]:
        """What a file's header says of the adapter."""
        layers = {} if self.layers is None else {"layers": self.layers}
        return {"target_modules": self.target_modules, **layers}
