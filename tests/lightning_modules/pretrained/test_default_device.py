"""Lightning configures a module with the trainer's device as PyTorch's default: nothing may follow it by itself.

Families, adapters and quantizations are in `test_fake_cuda.py`; here is what else there is, and its content.
"""

from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from lightning_modules.adapters.applied import AppliedLoRAs
from tests.support.commands import compose
from tests.support.tiny_adapters import build, export
from tests.support.tiny_pipelines import MODELS

# Stands for a GPU: what is made there by mistake has no content.
FOREIGN = torch.device("meta")
RANK = "adapter.rank=4"
ORTHO = ["adapter=ortho_tlora", RANK]
VARIANTS = {
    "offloaded_nf4": [*ORTHO, "model.offload.blocks=4", "model/quantization=fp4", "model.quantization.format=nf4"],
    "text_encoders": ["adapter=full", "adapter.text_encoders=true"],
}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a module's parts: parameters, buffers and plain attributes."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        own = part._parameters | part._buffers | vars(part)
        found |= {f"{name}.{key}": value for key, value in own.items() if isinstance(value, Tensor)}
    return found


def assert_nothing_follows(settings: Any, **more: Any) -> None:
    plain, foreign = (instantiate(settings, **more, _convert_="all") for _ in range(2))
    for module in (plain, foreign):
        module.check()
    plain.configure_model()
    with FOREIGN:
        foreign.configure_model()
    expected, found = tensors(plain), tensors(foreign)
    assert len(expected) > 50
    assert expected.keys() == found.keys()
    assert not [path for path, tensor in found.items() if tensor.device.type != "cpu"]
    assert not [path for path in found if not torch.equal(expected[path], found[path])]


def settings(repositories, model, *more):
    path = f"model.pretrained_model_name_or_path={repositories[model]}"
    return compose("train", f"model={model}", path, "model.dtype=float32", *MODELS[model].settings, *more).model


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_is_configured_the_same_on_any_device(repositories, variant):
    assert_nothing_follows(settings(repositories, "flux_kontext", *VARIANTS[variant]))


def test_prediction_is_configured_the_same_on_any_device(repositories, tiny, tmp_path):
    """This includes a T-LoRA and a start from one."""
    file = tmp_path / "x.safetensors"
    export(build(tiny, "ortho_tlora"), file)
    assert_nothing_follows(settings(repositories, "flux_kontext"), adapter=None, loras=AppliedLoRAs([file]))
    assert_nothing_follows(settings(repositories, "flux_kontext", *ORTHO, f"adapter.init_from={file}"))
