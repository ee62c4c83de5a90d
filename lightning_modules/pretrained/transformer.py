"""A pipeline's transformer: where it comes from, how it is quantized, and what it takes."""

import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import UserError, listing
from datamodules.shards.fingerprint import memo
from lightning_modules.execution.block_offload import streamed_blocks
from lightning_modules.pretrained.assembly import assemble
from lightning_modules.pretrained.component_files import check_weight_files, read_json
from lightning_modules.pretrained.quantized_cache import QuantizedTransformer
from lightning_modules.pretrained.repository import (
    content,
    load_model,
    repository_file,
    resolve_repository,
)
from lightning_modules.pretrained.transformer_files import (
    empty_transformer,
    settings_of,
    transformer_config,
    transformer_weights,
)
from lightning_modules.pretrained.weights import check_names
from lightning_modules.quantization.fp8 import log_kernels
from lightning_modules.quantization.quantization import Quantization
from lightning_modules.quantization.stored import HINTS

log = logging.getLogger("retouch")


class TransformerSource:
    """Where a transformer comes from, and what it will be like when it is loaded.

    Args:
        class_name: in diffusers.
        name: folder or hub id of a whole pipeline, or of nothing but the transformer; or `embedded`.
        revision: of a hub repository.
        dtype: of what is not quantized.
        quantization: of files that are not quantized; those that are are loaded as they are.
        streamed: how many of its blocks wait in the host's memory.
    """

    def __init__(
        self,
        class_name: str,
        name: str,
        revision: str | None,
        dtype: torch.dtype,
        quantization: Quantization | None,
        streamed: int,
    ) -> None:
        self.class_name = class_name
        self.name = name
        self.revision = revision
        self.dtype = dtype
        self.quantization = quantization
        self.streamed = streamed

    @property
    def repository(self) -> str:
        """The folder or hub id."""
        return resolve_repository(self.name)

    @property
    def _class(self) -> Any:
        import diffusers

        return getattr(diffusers, self.class_name)

    @cached_property
    def meta(self) -> Any:
        """The transformer without weights: names and shapes, to check against before anything is loaded."""
        with torch.device("meta"):
            return self._class.from_config(settings_of(self.config()))

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return transformer_config(self.repository, self.revision)

    def pipeline_index(self) -> dict[str, Any]:
        """model_index.json of the pipeline that it comes with; empty for a transformer alone."""
        path = repository_file(self.repository, "model_index.json", self.revision)
        return {} if path is None else read_json(path)

    def check_class(self, model: str) -> None:
        """Raise a UserError where it is of another class than a model takes."""
        found = self.config().get("_class_name")
        if found not in (self.class_name, None):
            raise UserError(
                f"{self.name} holds a {found}, {model} needs a {self.class_name}: choose the model= that goes with it"
            )

    def check(self) -> None:
        """Raise a UserError for settings that it cannot follow."""
        streamed_blocks(self.meta, self.streamed)
        if self.quantization is not None:
            self.quantization.chosen(self.meta)

    def check_files(self) -> None:
        """Find what a local transformer's files lack, or hold for other programs; raises a UserError."""
        if Path(self.repository).is_dir():
            folder = Path(self.repository, self.config()["_subfolder"] or ".")
            check_weight_files(folder, self.class_name)
            if (weights := transformer_weights(self.repository, self.revision)) is not None:
                check_names(weights, self.meta, str(folder))

    def load(self, device: torch.device, split: bool = False) -> Any:
        """The transformer, frozen; streamed blocks, and all of one that will be split over processes, on the CPU."""
        host = torch.device("cpu")
        streamed = tuple(f"{block}." for block in streamed_blocks(self.meta, self.streamed))
        placement = None
        if split or streamed:

            def placement(name: str) -> torch.device:
                return host if split or name.startswith(streamed) else device

        kept = self.kept(device) if self.stored_format is None else None
        repository, revision = self.repository, self.revision
        if kept is not None and kept.is_usable():
            log.info(f"the transformer was quantized to {self.quantization} by an earlier start: {kept.folder}")
            repository, revision = str(kept.folder), None
        transformer = load_transformer(
            self._class,
            repository,
            revision=revision,
            dtype=self.dtype,
            device=device,
            quantization=self.quantization,
            placement=placement,
        )
        if kept is not None and repository == self.repository:
            kept.write(transformer, self.quantization, self.name)
        log_kernels(transformer, device)
        return transformer

    def kept(self, device: torch.device) -> QuantizedTransformer | None:
        """Where it is kept when it has been quantized on this device; None where the settings keep none."""
        wanted = self.quantization
        if wanted is None or wanted.cache_dir is None or not wanted.is_kept:
            return None
        parts = {
            "source": self._content,
            "quantization": wanted.settings(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device.type,  # kernels round differently
        }
        return QuantizedTransformer.of(wanted.cache_dir, parts)

    @cached_property
    def _content(self) -> dict[str, str]:
        """Of the files that are quantized, to know what is kept of them."""
        assert self.quantization is not None
        assert self.quantization.cache_dir is not None
        pattern = f"{self.config()['_subfolder'] or '.'}/*"
        return content(self.repository, self.revision, [pattern], memo(self.quantization.cache_dir))

    @cached_property
    def stored_format(self) -> str | None:
        """The format that its linear layers have on disk; None where they are not quantized."""
        weights = transformer_weights(self.repository, self.revision)
        return None if weights is None else weights.format

    @cached_property
    def precision(self) -> str:
        """The format of its linear layers: what is on disk decides, then the settings."""
        stored, wanted = self.stored_format, self.quantization
        if stored is not None and wanted is not None and stored != wanted.format:
            log.warning(
                f"note: the checkpoint {self.name} is already {stored}: model.quantization.format={wanted.format} is "
                "ignored"
            )
        return stored or self._asked

    @property
    def expected_precision(self) -> str:
        """`precision`, as far as can be said without reading weights from the hub."""
        how = self.config().get("quantization_config") or {}
        if how.get("load_in_8bit"):
            return "int8"
        if how.get("load_in_4bit"):
            return how.get("bnb_4bit_quant_type", "fp4")
        return self.precision if Path(self.repository).is_dir() else self._asked

    @property
    def _asked(self) -> str:
        return str(self.dtype).removeprefix("torch.") if self.quantization is None else self.quantization.format

    @property
    def backend(self) -> str | None:
        """Whose quantized layers it has; None for ours."""
        return None if self.quantization is None else self.quantization.backend

    def check_unquantized(self, what: str) -> None:
        """Raise a UserError where it is quantized on disk."""
        if self.stored_format is not None:
            raise UserError(f"{what} needs unquantized weights; {self.name} is {self.stored_format} on disk")


def load_transformer(
    cls: type[Any],
    repository: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    quantization: Quantization | None = None,
    placement: Callable[[str], torch.device] | None = None,
) -> Any:
    """The transformer alone, frozen; its repository may be a whole pipeline or nothing but the transformer.

    Weights that are quantized on disk are loaded as they are.

    Args:
        quantization: of weights that are not quantized on disk.
        placement: the device that a parameter or layer of this name ends on; None for `device`.
    """
    config = transformer_config(repository, revision)
    weights = transformer_weights(repository, revision)
    if weights is None and (quantization is not None or placement is not None):
        raise UserError(f"{repository}: only safetensors weights can be quantized, offloaded or split")
    model = empty_transformer(cls, config)
    if weights is not None:
        check_names(weights, model, repository)
    if weights is None or (weights.format is None and quantization is None and placement is None):
        return load_model(cls, repository, config["_subfolder"], revision, dtype, device)

    asked = None if quantization is None else f"quantizing to {quantization}"
    if hints := [name for name in weights.dtypes if name.endswith(HINTS)]:
        log.info(f"note: scales of inputs on disk ({listing(hints)}) are not used: inputs are scaled by their own size")
    log.info(", ".join(filter(None, ["loading transformer", f"{weights.format} on disk" if weights.format else asked])))
    assemble(model, weights, dtype=dtype, device=device, quantization=quantization, placement=placement)
    return model.requires_grad_(False).eval()
