"""The components of a pipeline, each loaded on first use, offloaded and released."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from foundation.catalogue import shipped_configuration
from foundation.errors import UserError, listing
from lightning_modules.pretrained.component_files import ComponentFile, load_component, open_components
from lightning_modules.pretrained.repository import read_index, resolve_repository, with_weights
from lightning_modules.quantization.linear import QuantizedLinear
from lightning_modules.quantization.quantization import Quantization
from lightning_modules.timing import LOADING, StageTimer


@dataclass(eq=False)
class Components:
    """Components of one repository by name, each loaded on first use."""

    repository_name: str  # folder or hub id in diffusers' layout, or `embedded`
    revision: str | None  # of a hub repository
    dtype: torch.dtype  # of the models
    # Devices of `vae`, and of `text_encoder` for all others; None: the main device.
    placement: Mapping[str, torch.device | None]
    main_device: Callable[[], torch.device]  # returns the transformer's device
    timer: StageTimer
    quantization: Quantization | None = None  # of the components that it names
    # Class in diffusers and settings of components that the repository may lack.
    defaults: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    single_files: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by `text_encoder` and `vae`
    _loaded: dict[str, Any] = field(default_factory=dict)
    _offloaded: set[str] = field(default_factory=set)

    @cached_property
    def _shipped(self) -> tuple[str, dict[str, ComponentFile]] | None:
        """The folder in assets/ of a known model, and the files of its components if they hold all its weights."""
        folder = shipped_configuration(self.repository_name)
        if folder is None or self.revision is not None or not any(self.single_files.values()):
            return None
        files = open_components(self.single_files, str(folder), None)
        needed = {*with_weights(read_index(str(folder)))} - {"transformer"}
        return (str(folder), files) if needed <= files.keys() else None

    @cached_property
    def repository(self) -> str:
        """The folder or hub id of the components; a folder in assets/ if all their weights are in single files."""
        return resolve_repository(self.repository_name) if self._shipped is None else self._shipped[0]

    @cached_property
    def files(self) -> dict[str, ComponentFile]:
        """The components in single files; raise a UserError for a file that does not fit."""
        if self._shipped is not None:
            return self._shipped[1]
        return open_components(self.single_files, self.repository, self.revision)

    def format(self, name: str) -> str | None:
        """Return the format of a component's quantized linear layers; None for 16 or 32 bits."""
        if name in self.quantized and self.quantization is not None:
            return self.quantization.format
        return self.files[name].weights.format if name in self.files else None

    def place(self, name: str) -> torch.device | None:
        """Return a component's device in the settings; None for the main device."""
        return self.placement["vae" if name == "vae" else "text_encoder"]

    def device(self, name: str) -> torch.device:
        return self.place(name) or self.main_device()

    def __getitem__(self, name: str) -> Any:
        device = self.device(name)
        if name not in self._loaded:
            with self.timer.stage(LOADING):
                self._loaded[name] = self._load(name, device)
        elif name in self._offloaded:
            self._loaded[name].to(device)
            self._offloaded.remove(name)
        return self._loaded[name]

    def _load(self, name: str, device: torch.device) -> Any:
        if name in self.defaults and name not in read_index(self.repository, self.revision):
            class_name, settings = self.defaults[name]
            return getattr(importlib.import_module("diffusers"), class_name)(**settings)
        quantization = self.quantization if name in self.quantized else None
        if name in self.files:
            part = self.files[name].load(device, self.dtype, quantization)
        else:
            part = load_component(self.repository, name, self.revision, self.dtype, device, quantization)
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if isinstance(module, QuantizedLinear):
                module.rounds = False  # prompts are encoded once, and T5's largest values are far above the others
        return part

    def models(self) -> dict[str, nn.Module]:
        return {name: part for name, part in self._loaded.items() if isinstance(part, nn.Module)}

    @property
    def quantized(self) -> list[str]:
        chosen = () if self.quantization is None else self.quantization.components_to_quantize
        return [name for name in chosen if name != "transformer"]

    def check_quantization(self, texts: Sequence[str]) -> None:
        """Raise a UserError if a component to quantize is not a text encoder; `texts` encode text."""
        index = read_index(self.repository, self.revision)  # not the classes: most runs need none of them
        known = [name for name in texts if name in with_weights(index)]
        if unknown := [name for name in self.quantized if name not in known]:
            key, choices = "model.quantization.components_to_quantize", ", ".join(["transformer", *known])
            raise UserError(f"{key}: {listing(unknown)} cannot be quantized. Choose from {choices}.")

    def quantization_settings(self) -> dict[str, Any]:
        """Return what the outputs of quantized components depend on; empty without any."""
        if self.quantization is None or not self.quantized:
            return {}
        how = asdict(self.quantization) | {"components_to_quantize": sorted(self.quantized)}
        return {"quantization": how | {"modules_to_not_convert": list(self.quantization.modules_to_not_convert)}}

    def weight_bytes(self, name: str, part: nn.Module) -> int:
        """Return the bytes of a model's weights; it may be on the meta device."""
        if (format := self.format(name)) is not None:
            kept = self.quantization.modules_to_not_convert if self.quantization and name in self.quantized else ()
            return Quantization(format, kept, (), False).nbytes(part, self.dtype)
        return sum(parameter.numel() for parameter in part.parameters()) * self.dtype.itemsize

    def offload_to_cpu(self) -> None:
        """Move the models to host memory until they are used again."""
        moving = [name for name in self.models() if name not in self._offloaded and self.device(name).type != "cpu"]
        for name in moving:
            self._loaded[name].to("cpu")
        self._offloaded.update(moving)
        if moving and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def release(self, *names: str) -> None:
        """Unload components and free their memory."""
        for name in names:
            self._loaded.pop(name, None)
            self._offloaded.discard(name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
