"""Full fine-tuning of the transformer, and optionally of the text encoders."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError
from foundation.files import replacing_folder
from lightning_modules.adapters.adapter import Adapter, trainable
from lightning_modules.family import ALIKE, Family, Layers
from lightning_modules.lora_files.writing import require_finite
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import component_folder, read_index
from lightning_modules.quantization.linear import QuantizedLinear


class FullFineTuning(Adapter):
    """Training of all weights, in float32; they are written as a whole pipeline in the base's dtype.

    Args:
        text_encoders: whether these train as well; then prompts are encoded in every step, even with cached latents.
    """

    folder = "model"
    trains_base = True

    def __init__(self, text_encoders: bool) -> None:
        self.trains_text_encoders = text_encoders

    def check(self, base: FrozenBase, sharded: bool, text_sees_images: bool) -> None:
        problems = {
            "adapter=full: weights that train must not be quantized. Choose a bf16 model=.": (
                base.source.quantization is not None or base.source.stored_format is not None
            ),
            "trainer=fsdp trains adapters: adapter=full needs the whole model in each process": sharded,
            "adapter=full copies the other parts from a whole pipeline. Leave out the files of text encoders and "
            "autoencoder": bool(base.components.files),
            "adapter=full trains every block, and offloaded ones are frozen. Leave out model.offload.blocks": (
                base.source.streamed
            ),
        }
        if self.trains_text_encoders:
            encoders = "adapter.text_encoders=true: text encoders that"
            problems |= {
                f"{encoders} train must not be quantized": bool(base.components.quantized),
                f"{encoders} train stay next to the transformer. Leave out model.devices.text_encoder": (
                    base.components.place("text_encoder") is not None
                ),
                f"{encoders} see the condition images stay frozen": text_sees_images,
                f"{encoders} {base.family_class.__name__} uses stay frozen": (
                    base.family_class.encode_prompts is Family.encode_prompts
                ),
            }
        for problem, exists in problems.items():
            if exists:
                raise UserError(problem)

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        if any(isinstance(module, QuantizedLinear) for module in transformer.modules()):
            raise UserError(f"adapter=full: {type(transformer).__name__} is quantized on disk. Choose 16-bit weights.")
        transformer.requires_grad_(True).train()
        for parameter in transformer.parameters():
            parameter.data = parameter.data.float()

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in trainable(part).items()}

    def gather(self, parts: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
        for part in parts.values():
            require_finite(trainable(part), "or clip gradients by trainer.gradient_clip_val")
        return parts

    def write(
        self, folder: Path, gathered: Any, base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        index = read_index(base.components.repository, base.revision)
        others = [name for name in index if not name.startswith("_") and name not in gathered]
        source = component_folder(base.components.repository, base.revision, others)
        with replacing_folder(folder) as unfinished:
            for index_file in source.glob("*model_index.json"):
                shutil.copyfile(index_file, unfinished / index_file.name)
            for name in others:
                if (source / name).is_dir():  # an optional component may be missing
                    shutil.copytree(source / name, unfinished / name)
            for name, part in gathered.items():
                with self.in_dtype(part, base.dtype):
                    part.save_pretrained(unfinished / name)
            for config in (*unfinished.glob("*model_index.json"), *unfinished.glob("*/config.json")):
                _forget_origin(config)

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        what = "the transformer and the text encoders" if self.trains_text_encoders else "the transformer"
        return f"all of {what}: {sum(tensor.numel() for tensor in trained.values()):,} parameters"

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"model": model_name, "model.pretrained_model_name_or_path": f"{run}/{self.folder}/last"}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        return []

    def __str__(self) -> str:
        return "full fine-tuning"


def _forget_origin(config: Path) -> None:
    """Remove the recorded origin of a model, or of the components in a modular pipeline's index."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    here = {name: one for name, one in settings.items() if (config.parent / name).is_dir()}
    origins = [entry[2] for entry in here.values() if len(entry) == 3]
    for origin in origins:
        origin["pretrained_model_name_or_path"] = None
    if settings.pop("_name_or_path", None) is not None or origins:
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
