"""Full fine-tuning: all of the transformer trains, and the text encoders where they are told to."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from datamodules.errors import UserError
from datamodules.files import replacing_folder
from lightning_modules.adapters.adapter import Adapter, trainable
from lightning_modules.adapters.formats.diffusers import require_finite
from lightning_modules.pretrained.repository import local_folder, read_index

if TYPE_CHECKING:
    from lightning_modules.edit_module import EditModule


class FullFineTuning(Adapter):
    """All weights train, in float32, and are written as a whole pipeline in the base's dtype.

    Args:
        text_encoders: whether these train too; then prompts are encoded in every step, also beside cached latents.
    """

    folder = "model"
    keeps_steps = False

    def __init__(self, text_encoders: bool) -> None:
        self.trains_text_encoders = text_encoders

    def preflight(self, module: "EditModule") -> None:
        if module.source.quantization is not None or module.source.stored_format is not None:
            raise UserError("adapter=full trains the base's weights, which must not be quantized: choose a bf16 model=")
        if module.device_mesh is not None:
            raise UserError("trainer=fsdp trains adapters: adapter=full needs the whole model in each process")
        if self.trains_text_encoders and module.components.quantized:
            raise UserError("adapter.text_encoders=true: text encoders that train must not be quantized")
        if self.trains_text_encoders and module.components.place("text_encoder") is not None:
            raise UserError("model.devices.text_encoder: text encoders that train are beside the transformer")
        if module.offload["blocks"]:
            raise UserError("adapter=full does not go with model.offload.blocks, whose blocks cannot change")
        if self.trains_text_encoders and module.condition_images.text_sees_them:
            raise UserError("adapter.text_encoders=true: text encoders that see the condition images stay frozen")

    def inject(self, transformer: nn.Module) -> None:
        transformer.requires_grad_(True).train()
        for parameter in transformer.parameters():
            parameter.data = parameter.data.float()

    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in trainable(part).items()}

    def export(self, module: "EditModule", header: Mapping[str, Any]) -> Callable[[Path], None]:
        repository, revision = module.components.repository, module.revision
        index = read_index(repository, revision)
        trained: dict[str, Any] = dict(module.trained_parts())
        for part in trained.values():
            require_finite(trainable(part))

        def write(folder: Path) -> None:
            others = [name for name in index if not name.startswith("_") and name not in trained]
            base = local_folder(repository, revision, others)
            with replacing_folder(folder) as unfinished:
                shutil.copyfile(base / "model_index.json", unfinished / "model_index.json")
                for name in others:
                    if (base / name).is_dir():  # what a pipeline may lack has none
                        shutil.copytree(base / name, unfinished / name)
                for name, part in trained.items():
                    with self.in_dtype(part, module.base_dtype):
                        part.save_pretrained(unfinished / name)
                for config in unfinished.glob("*/config.json"):
                    _forget_origin(config)

        return write

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        what = "the transformer and the text encoders" if self.trains_text_encoders else "the transformer"
        return f"all of {what}: {sum(tensor.numel() for tensor in trained.values()):,} parameters"

    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        return {"model": model_name, "model.pretrained_model_name_or_path": f"{run}/{self.folder}/last"}

    def loading_code(self, weights: str) -> list[str]:
        return []

    def __str__(self) -> str:
        return "full fine-tuning"


def _forget_origin(config: Path) -> None:
    """diffusers notes the folder that a model was loaded from, which is nobody else's business."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    if settings.pop("_name_or_path", None) is not None:
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
