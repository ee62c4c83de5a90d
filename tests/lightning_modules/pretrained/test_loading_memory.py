"""Loading holds no copies: on the host by the process's anonymous memory, on a GPU by a count of fake tensors."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import loading_memory
from lightning_modules.estimation.memory import PeakMemory
from lightning_modules.pretrained.weights import Weights, assemble
from tests.support.quantized import quantization


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Save a FLUX transformer of 1 GB in bf16 with the real widths."""
    folder = tmp_path_factory.mktemp("large")
    loading_memory.write_transformer(folder, depth=1)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Save a part of T5-XXL in float32."""
    folder = tmp_path_factory.mktemp("encoder") / "repository"
    loading_memory.write_encoder(folder, torch.float32, layers=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fp4", "encoder nf4"])
def test_loading_needs_little_more_memory_than_the_loaded_model(way, repository, encoder):
    folder = encoder if way.startswith("encoder") else repository
    peak, result = loading_memory.measure(way, folder)
    allowed = 1.1 * result + loading_memory.largest_tensor(folder) + 150_000_000
    print(f"peak {peak / 1e9:.3f} GB, allowed {allowed / 1e9:.3f} GB, result {result / 1e9:.3f} GB")
    assert peak > 0.5 * result, "what stays is anonymous memory: it was not measured"
    assert peak < allowed


class FakeWeights(Weights):
    """Files of a model on the meta device, without content."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], dtype=torch.bfloat16)


@pytest.mark.parametrize("format", [None, "fp8"])
def test_a_gpu_holds_one_unquantized_layer_at_a_time(format):
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=2)
    weights = FakeWeights(model)
    largest = 2 * max(shape.numel() for shape in weights.shapes.values())
    settings = None if format is None else quantization(format)
    with FakeTensorMode(allow_non_fake_inputs=True), PeakMemory("cuda") as memory:
        assemble(model, weights, dtype=torch.bfloat16, device=torch.device("cuda"), quantization=settings)
    whole = sum(shape.numel() for shape in weights.shapes.values()) * 2
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert 0.2 * whole < memory.now <= whole
    assert memory.peak < 1.1 * memory.now + largest + 0.15e9
