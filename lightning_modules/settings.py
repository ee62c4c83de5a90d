"""The settings of a model, `model` in conf/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_modules.family import Sampling
from lightning_modules.flow import TimestepLaw
from lightning_modules.quantization.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings that all model families share; conf/model/_base.yaml explains them and has their defaults.

    Attributes:
        pretrained_model_name_or_path: folder or hub id in diffusers' layout, or `embedded`.
        quantization: formats of the components that it names; a transformer that is quantized on disk is loaded as it
            is.
        gradient_checkpointing: as for `read_policy`; `auto` is `full` until `Execution.set_checkpointing`.
        recipe: the model's defaults for other groups, which conf/ reads from here.
        max_sequence_length: as in `Family`.
        training_guidance_scale: the guidance embedding in training, if the transformer is guidance-distilled.
    """

    pretrained_model_name_or_path: str
    transformer_name_or_path: str | None
    text_encoder_name_or_path: str | Sequence[str] | None
    vae_name_or_path: str | None
    comfyui: str | None
    revision: str | None
    resolution: int
    dtype: str
    devices: Mapping[str, str | None]
    quantization: Quantization | None
    offload: Mapping[str, Any]
    gradient_checkpointing: bool | str
    compile: bool | str
    attention_backend: str | None
    training_adapter: str | None
    timesteps: TimestepLaw
    vae_encode_mode: str
    seed: int
    recipe: Mapping[str, Any]
    sampling: Sampling
    max_sequence_length: int = 0
    training_guidance_scale: float = 1.0
