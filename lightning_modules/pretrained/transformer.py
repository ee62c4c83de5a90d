"""A pipeline's transformer: its repository, its precision, and loading it."""

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foundation.catalogue import shipped_configuration
from foundation.errors import UserError
from foundation.hub import repository_file
from foundation.notes import note_once
from lightning_modules.blocks import streamed_blocks
from lightning_modules.family import Family
from lightning_modules.lora_files.names import NO_NATIVE_NAMES, NativeNames
from lightning_modules.pretrained import checks
from lightning_modules.pretrained.repository import index_file, meta_model, read_index, resolve_repository
from lightning_modules.pretrained.single_file import GGUFWeights, name_tensors, open_file, single_file
from lightning_modules.pretrained.weights import Weights, assemble
from lightning_modules.quantization.eight_bit import has_tensor_cores, multiplies_int8
from lightning_modules.quantization.quantization import QUANTIZATIONS, Quantization

log = logging.getLogger("retouch")


def transformer_config(repository: str, revision: str | None = None) -> dict[str, Any]:
    """Read the transformer's config.json, from its subfolder or from a repository that contains nothing else."""
    for filename in ("transformer/config.json", "config.json"):
        if path := repository_file(repository, filename, revision):
            config = checks.read_json(path)
            checks.refuse_method(config, repository)
            return config | {"_subfolder": filename.rpartition("/")[0] or None}
    what = f"it holds no transformer{checks.files_in(repository)}"
    raise UserError(f"{repository} has neither transformer/config.json nor config.json: {what}")


@dataclass(eq=False)
class TransformerSource:
    """The source of a transformer, and its properties once loaded."""

    class_name: str  # in diffusers
    name: str  # folder or hub id of a whole pipeline, or of a transformer only; a single file; or `embedded`
    revision: str | None  # of a hub repository, or of the pipeline of a single file
    dtype: torch.dtype  # of unquantized weights
    quantization: Quantization | None  # of files that are not quantized; quantized ones are loaded as they are
    streamed: int  # how many of its blocks are offloaded to host memory
    native: NativeNames = NO_NATIVE_NAMES  # in single files
    pipeline: str = ""  # folder or hub id of the pipeline that a single file is for

    @cached_property
    def file(self) -> Path | None:
        """The single file of its weights; None for a repository."""
        return single_file(self.name, "model.transformer_name_or_path")

    @property
    def repository(self) -> str:
        """The folder or hub id, or the path of its single file."""
        return resolve_repository(self.name) if self.file is None else str(self.file)

    def config(self) -> dict[str, Any]:
        """Read its config.json; a single file's is next to it, or in its pipeline."""
        if self.file is None:
            return transformer_config(self.repository, self.revision)
        beside = self.file.with_name("config.json")
        if beside.is_file() and (config := checks.read_json(beside)).get("_class_name") == self.class_name:
            return config | {"_subfolder": None}
        shipped = None if self.revision else shipped_configuration(self.pipeline)
        return transformer_config(resolve_repository(str(shipped or self.pipeline)), self.revision)

    def weights(self) -> Weights:
        """Open its weights; raise a UserError if they are damaged or do not fit."""
        if self.file is None:
            subfolder = self.config()["_subfolder"]
            weights = checks.open_weights(self.repository, subfolder, "diffusers", self.revision)
            checks.check_names(weights, self.meta, str(Path(self.repository, subfolder or "")))
            return weights
        stored = open_file(self.file)
        named = name_tensors(stored, self.file, self.meta, self.native)
        if isinstance(stored, GGUFWeights) and self.quantization is None:
            note_once(
                f"{self.file.name} is {stored.type} on disk and becomes {self._configured}. model/quantization=nf4 or "
                "fp8 takes less memory"
            )
        return named

    def empty(self) -> Any:
        """Build the transformer with its parameters on the meta device, but with its buffers."""
        return self._build(parameters_only=True)

    @cached_property
    def meta(self) -> Any:
        """The transformer on the meta device: its names and shapes."""
        return self._build()

    def _build(self, parameters_only: bool = False) -> Any:
        import diffusers

        config = {k: value for k, value in self.config().items() if k not in ("_subfolder", "quantization_config")}
        return meta_model(getattr(diffusers, self.class_name), config, parameters_only)

    def pipeline_index(self) -> dict[str, Any]:
        """Read the index of its pipeline; empty for a transformer only."""
        here = self.file is None and index_file(self.repository, self.revision) is not None
        return read_index(self.repository, self.revision) if here else {}

    def check_settings(self, family: type[Family]) -> None:
        """Raise a UserError if it is not one that the model needs, or settings do not fit it."""
        config = self.config()
        found = config.get("_class_name")
        if found not in (self.class_name, None):
            raise UserError(
                f"{self.name} holds a {found}, {family.__name__} needs a {self.class_name}: choose "
                f"{checks.models_for(found) or 'the model= for it'}"
            )
        if reasons := [why for setting, why in family.refused.items() if config.get(setting)]:
            raise UserError(f"{self.name} {reasons[0]}")
        streamed_blocks(self.meta, self.streamed)
        if self.quantization is not None:
            self.quantization.check(self.meta)

    def check_files(self) -> None:
        """Raise a UserError if a local transformer's files are incomplete or of a kind that is not read."""
        if os.path.exists(self.repository):
            self.weights()

    def load(self, device: torch.device, split: bool = False) -> Any:
        """Load the transformer, frozen.

        Args:
            split: load everything to the CPU, to be split over processes; otherwise only streamed blocks.

        Raises:
            UserError: the files are damaged or in a format that is not read, or cannot be quantized.
        """
        weights, quantization = self.weights(), self.quantization
        streamed = tuple(f"{block}." for block in streamed_blocks(self.meta, self.streamed))
        model = self.empty()

        def placement(name: str) -> torch.device:
            return torch.device("cpu") if split or name.startswith(streamed) else device

        how = "" if quantization is None else f", quantizing to {quantization.format}"
        stored = f", {weights.format} on disk" if weights.format and weights.format == self.precision else how
        log.info(f"loading transformer{f' of {self.file.name}' if self.file else ''}{stored}")
        assemble(model, weights, dtype=self.dtype, device=device, quantization=quantization, placement=placement)
        storages = {getattr(module, "storage", "").split(" ")[0] for module in model.modules()}
        for format, multiplies in {"fp8": has_tensor_cores, "int8_w8a8": multiplies_int8}.items():
            if format in storages:  # nothing else shows that tensor cores stay idle
                how = "products in 8 bits" if multiplies(device) else f"weights only; {device} has no 8-bit products"
                log.info(f"{format}: {how}")
        return model.requires_grad_(False).eval()

    @cached_property
    def stored_format(self) -> str | None:
        """The format of its linear layers on disk; None if they are not quantized."""
        return self.weights().format

    @cached_property
    def precision(self) -> str:
        """The format of its linear layers: the files decide, then the settings."""
        stored, wanted = self.stored_format, self._configured
        if self.quantization is None or stored is None:
            return stored or wanted
        if self.quantization.source_dtypes.issuperset(QUANTIZATIONS[stored].dtypes):
            return wanted
        if stored != wanted:
            log.warning(f"note: {self.name} is {stored} on disk: model.quantization.format={wanted} is ignored")
        return stored

    @property
    def expected_precision(self) -> str:
        """`precision`, without reading weights from the hub."""
        how = self.config().get("quantization_config") or {}
        if how.get("load_in_8bit") or how.get("load_in_4bit"):
            return "int8_w8a8" if how.get("load_in_8bit") else how.get("bnb_4bit_quant_type", "fp4")
        here = self.file is not None or any(Path(self.repository).glob("**/*.safetensors"))
        return self.precision if here else self._configured

    @property
    def _configured(self) -> str:
        return str(self.dtype).removeprefix("torch.") if self.quantization is None else self.quantization.format

    def plain_weights(self, task: str) -> Weights:
        """Open its weights for a task; raise a UserError if they are quantized on disk."""
        weights = self.weights()
        if weights.format is not None:
            raise UserError(f"{task} needs unquantized weights; {self.name} is {weights.format} on disk")
        return weights
