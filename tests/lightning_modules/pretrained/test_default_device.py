"""Lightning configures a module with the trainer's device as PyTorch's default: nothing may follow it by itself.

Families, adapters and quantizations are in `test_fake_cuda.py`; here is what else there is, and its content.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from lightning_modules.adapters.applied import AppliedLoRAs
from tests.support.commands import compose
from tests.support.tiny_adapters import build, export
from tests.support.tiny_pipelines import MODELS

# Stands for a GPU: what is made there by mistake has no content.
FOREIGN = torch.device("meta")
RANK = "adapter.rank=4"
ORTHO = ["adapter=ortho_tlora", RANK]
VARIANTS = {
    "gaussian": ["adapter=lora", RANK, "adapter.init_lora_weights=gaussian", "adapter.target_modules=all-linear"],
    "offloaded": ["adapter=lora", RANK, "model.offload.blocks=3", "model.offload.activations=true"],
    "offloaded_nf4": [*ORTHO, "model.offload.blocks=4", "model/quantization=fp4", "model.quantization.format=nf4"],
    "compiled": ["adapter=tlora", RANK, "model.compile=true", "model.gradient_checkpointing=selective"],
    "text_encoders": ["adapter=full", "adapter.text_encoders=true"],
}
LIBRARIES = {"torch", "lightning_modules", "diffusers", "transformers", "peft", "bitsandbytes", "optimum"}


def tensors(root: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors reachable from an object by attributes, items, hooks and closures, with their paths."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("", root)])
    while waiting:
        path, one = waiting.popleft()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield path, one
        if isinstance(one, Mapping):
            # Hooks have numbers that no other hook of the process has.
            found = [(at if isinstance(name, int) else name, value) for at, (name, value) in enumerate(one.items())]
        elif isinstance(one, list | tuple):
            found = list(enumerate(one))
        elif isinstance(one, FunctionType):
            found = [(at, cell.cell_contents) for at, cell in enumerate(one.__closure__ or ())]
        elif isinstance(one, MethodType):
            found = [("self", one.__self__)]
        elif isinstance(one, partial):
            found = [("args", one.args), ("func", one.func), ("keywords", one.keywords)]
        elif type(one).__module__.partition(".")[0] in LIBRARIES:
            found = list(vars(one).items()) if hasattr(one, "__dict__") else []
        else:
            continue
        waiting += [(f"{path}.{name}", value) for name, value in found]


def content(module: Any) -> dict[str, Tensor]:
    """Return all tensors by path, except those of the model without content."""
    vars(module.base.source).pop("meta", None)
    return dict(tensors(module))


def assert_nothing_follows(settings: Any, **more: Any) -> None:
    plain, foreign = (instantiate(settings, **more, _convert_="all") for _ in range(2))
    for module in (plain, foreign):
        module.check()
    plain.configure_model()
    with FOREIGN:
        foreign.configure_model()
    expected, found = content(plain), content(foreign)
    assert len(expected) > 50
    assert expected.keys() == found.keys()
    assert not [path for path, tensor in found.items() if tensor.device.type != "cpu"]
    # The buffers that blocks come to are without content.
    made = [path for path in found if not re.search(r"hooks.*\._buffers\.", path)]
    assert not [path for path in made if not torch.equal(expected[path], found[path])]


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
