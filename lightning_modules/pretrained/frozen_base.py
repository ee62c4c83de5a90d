"""The frozen pipeline that is fine-tuned: its repository, components and transformer."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.errors import UserError, listing
from foundation.notes import note_once
from lightning_modules import flow
from lightning_modules.family import Family, Sampling
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.pretrained import repository
from lightning_modules.pretrained.checks import check_component, models_for, open_weights
from lightning_modules.pretrained.comfyui import with_comfyui
from lightning_modules.pretrained.components import Components
from lightning_modules.pretrained.single_file import single_file
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.settings import ModelSettings
from lightning_modules.timing import LOADING, StageTimer

# Words in the names of distilled checkpoints, such as Z-Image-Turbo, FLUX.1-schnell and Qwen-Image-Lightning.
DISTILLED = re.compile(r"(?<![a-z])(turbo|schnell|lightning|distilled)(?![a-z])", re.IGNORECASE)


class FrozenBase:
    """A pipeline whose own weights never change.

    A plain object, since Lightning would move and save a submodule. Nothing is loaded before its first use.

    Args:
        family_class: the kind of pipeline that it must be.
        device: returns the transformer's device, which is known once the trainer is.
    """

    def __init__(self, family_class: type[Family], settings: ModelSettings, device: Callable[[], torch.device]) -> None:
        self.family_class = family_class
        self.name = settings.pretrained_model_name_or_path
        self.transformer_name = settings.transformer_name_or_path or self.name
        self.revision = revision = settings.revision
        self.dtype = repository.resolve_dtype(settings.dtype)
        self.timer = StageTimer()
        self.offloads_encoders = bool(settings.offload["encoders"])
        self._device = device
        self._transformer_is_loaded = False
        quantization = settings.quantization
        quantized = () if quantization is None else quantization.components_to_quantize
        key = "model.transformer_name_or_path"
        source = TransformerSource(
            family_class.transformer_class,
            self.transformer_name,
            revision if self.transformer_name == self.name or single_file(self.transformer_name, key) else None,
            self.dtype,
            quantization if "transformer" in quantized else None,
            settings.offload["blocks"],
            family_class.layers.native,
            self.name,
        )
        settings = with_comfyui(settings, family_class, source)
        self.transformer_name = settings.transformer_name_or_path or self.name
        self.source = replace(source, name=self.transformer_name)
        devices = settings.devices.items()
        placement = {name: repository.resolve_device(one, f"model.devices.{name}") for name, one in devices}
        texts, vae = settings.text_encoder_name_or_path, settings.vae_name_or_path
        files = {"text_encoder": [texts] if isinstance(texts, str) else texts or [], "vae": [vae] if vae else []}
        more = self.timer, quantization, family_class.default_components, files
        self.components = Components(self.name, revision, self.dtype, placement, device, *more)

    @property
    def device(self) -> torch.device:
        return self._device()

    @property
    def title(self) -> str:
        """Its name, and the name of a transformer from elsewhere."""
        other = "" if self.transformer_name == self.name else f" with {Path(self.transformer_name).name}"
        return self.name + other

    @property
    def index(self) -> dict[str, Any]:
        """The classes of its components, and its pipeline's settings."""
        own = repository.read_index(self.components.repository, self.revision)
        return {name: ["diffusers", one[0]] for name, one in self.family_class.default_components.items()} | own

    @property
    def layer_names(self) -> LayerNames:
        """The transformer's layers by their names in LoRA files."""
        return LayerNames(self.source.meta, self.family_class.layers.native)

    @property
    def encoder_names(self) -> Sequence[str]:
        """The names of the components that encode: text encoders and the autoencoder."""
        return (*self.family_class.text_components, "vae")

    def check(self) -> None:
        """Raise a UserError if the repository does not fit the settings, before any weights are read."""
        if self.source.file is not None:  # its own error tells more than its pipeline's
            self.source.check_files()
        index = self.index
        made_for, family = index.get("_class_name"), self.family_class
        if made_for != family.pipeline_name and (others := models_for(made_for)):
            raise UserError(f"{self.name} is made for {made_for}: choose {others}")
        self.source.check_settings(family)
        if missing := [name for name in (*self.encoder_names, "scheduler") if name not in index]:
            raise UserError(
                f"{self.name} has no {listing(missing)}, which {family.__name__} needs: it is made for {made_for}"
            )
        list(self.components.files)  # they are opened here
        self.components.check_quantization([name for name in family.text_components if name in index])
        if made_for != family.pipeline_name:
            note_once(
                f"{self.name} names {made_for}, which no model of Retouch has: it is used as a {family.pipeline_name}"
            )

    def check_files(self) -> None:
        """Raise a UserError for damaged files of a local repository; the hub's are checked when they are loaded."""
        index = self.index
        for name in (*self.encoder_names, "scheduler"):
            folder = Path(self.components.repository, name)
            if folder.is_dir() and name not in self.components.files:
                check_component(folder, index[name][1])
        self.source.check_files()

    def load_transformer(self, sharded: bool = False) -> Any:
        """Load the transformer to its device, frozen; with offload.encoders, other components make room first."""
        if self.offloads_encoders:
            self.components.offload_to_cpu()
        with self.timer.stage(LOADING):
            transformer = self.source.load(self.device, sharded)
        self._transformer_is_loaded = True
        return transformer

    def load_encoders(self) -> None:
        """Load text encoders and autoencoder now, not with the first batch."""
        for name in self.encoder_names:
            self.components[name]
            self.offload_to_cpu()

    def offload_to_cpu(self) -> None:
        """Make room for a loaded transformer, with offload.encoders."""
        if self.offloads_encoders and self._transformer_is_loaded:
            self.components.offload_to_cpu()

    def release(self) -> None:
        self._transformer_is_loaded = False
        self.components.release(*self.components.models())

    @cached_property
    def vae_config(self) -> dict[str, Any]:
        """The autoencoder's config.json: training from cached latents never loads its weights."""
        return repository.component_config(self.components.repository, "vae", self.revision)

    def vae_tensor(self, name: str) -> Tensor:
        """Read only this one of the autoencoder's tensors, (...) in its file's dtype."""
        if "vae" in self.components.files:
            return self.components.files["vae"].weights.map(name)
        origin, revision, subfolder = repository.component_origin(self.components.repository, "vae", self.revision)
        return open_weights(origin, subfolder, "diffusers", revision).map(name)

    def latent_size(self, width: int, height: int) -> torch.Size:
        """Return (height, width) of an image's latent."""
        halvings = self.vae_config.get("temperal_downsample") or self.vae_config["block_out_channels"][1:]
        return torch.Size((height >> len(halvings), width >> len(halvings)))

    def dynamic_shift(self, tokens: int) -> float:
        """Return its scheduler's shift for a target of so many tokens."""
        config = self.components["scheduler"].config
        return flow.dynamic_shift(tokens, config) if config["use_dynamic_shifting"] else config["shift"]

    def sampling_timesteps(self, tokens: int, sampling: Sampling) -> Tensor:
        """Return the pipeline's timesteps (num_inference_steps,), in [0, 1000], for a target of so many tokens."""
        scheduler, steps = sampling.scheduler(self.components["scheduler"]), sampling.num_inference_steps
        sigmas = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64)
        mu = self.family_class.sampling_rules.mu({**self.index, **scheduler.config}, tokens, steps)
        scheduler.set_timesteps(sigmas=sigmas.tolist(), mu=mu)
        return scheduler.timesteps

    def identity(self, memo: Path) -> dict[str, Any]:
        """Return what the outputs of its encoders depend on.

        Args:
            memo: a file that remembers the checksums of a local model's files.
        """
        files = {name: file.path for name, file in self.components.files.items()}
        where = self.components.repository, self.revision
        return {
            "family": self.family_class.__name__,
            "model": repository.encoders_identity(*where, self.encoder_names, memo, files),
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.components.quantization_settings(),
        }

    def provenance(self) -> dict[str, Any]:
        """Return its entries in a LoRA file's header."""
        formats = {name: self.components.format(name) for name in self.encoder_names}
        return {
            "base": self.name,
            "transformer": self.transformer_name,
            "base_precision": self.source.precision,
            **{f"{name}_precision": format for name, format in formats.items() if format},
        }

    def sign_of_distillation(self) -> str | None:
        """Return how the transformer is known to be distilled to few steps; None if nothing says so.

        FLUX.1 [dev], whose guidance was distilled and not its steps, is not.
        """
        index, names = self.source.pipeline_index(), [self._transformer_repository]
        if not index:  # a transformer only is most often of the base's kind
            index = self.index
            names.append(self.name)
        for config, file in ((index, "model_index.json"), (self.source.config(), "the transformer's config.json")):
            if config.get("is_distilled") is True:
                return f"is_distilled in {file}"
        found = (DISTILLED.search(Path(name).name) for name in (*names, str(index.get("_name_or_path"))))
        return next((f"{match[1]} in its name" for match in found if match), None)

    @property
    def _transformer_repository(self) -> str:
        return self.name if self.source.repository == self.components.repository else self.source.name

    def note_distilled(self) -> None:
        """Warn, once, if the transformer is distilled: a LoRA trained directly on it loses its few-step ability."""
        if sign := self.sign_of_distillation():
            note_once(
                f"{self._transformer_repository} is distilled to few steps ({sign}): a LoRA trained directly on it "
                "loses that ability. Train on the base checkpoint, and sample with this one by "
                "model.sampling.transformer_name_or_path; or train with a LoRA that undoes the distillation, "
                "model.training_adapter: docs/training.md, distilled bases"
            )
