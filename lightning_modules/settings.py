"""The settings of a model, `model` in conf/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_modules.family import Sampling
from lightning_modules.flow import TimestepLaw
from lightning_modules.quantization.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings that all model families share; conf/model/_base.yaml has their defaults.

    Attributes:
        pretrained_model_name_or_path: folder or hub id in diffusers' layout, or `embedded`.
        transformer_name_or_path: repository of the transformer; None for the same repository.
        text_encoder_name_or_path: single file, or several, of the text encoders; None for the repository's.
        vae_name_or_path: single file of the autoencoder; None for the repository's.
        comfyui: folder of ComfyUI for the files that those do not name; None for none.
        revision: branch, tag or commit of pretrained_model_name_or_path on the hub.
        resolution: side of a square image.
        dtype: of the frozen weights, `float32` or `bfloat16`.
        devices: of `text_encoder` and `vae`; None for the transformer's.
        quantization: of the components that it names; None for no quantization. A transformer that is quantized on disk
            is loaded as it is.
        offload: to CPU memory: `encoders`, whether the other components make room for a loaded transformer; `blocks`, a
            number of the transformer's blocks; `activations`, whether those of a training step.
        gradient_checkpointing: of `read_policy`; `auto` is `full` until `Execution.set_checkpointing`.
        compile: whether the transformer's blocks are compiled; `auto` for long runs on CUDA.
        attention_backend: of `set_attention_backend`.
        training_adapter: a frozen LoRA that is active in training steps; None for no LoRA.
        timesteps: the distribution of training timesteps.
        vae_encode_mode: train on a `sample` of the target's latent distribution, or on its `mode`.
        seed: of all randomness in training.
        recipe: the model's defaults for other groups, which conf/ reads from here.
        sampling: in training and in prediction; None if nothing is sampled.
        max_sequence_length: of `Family`.
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
