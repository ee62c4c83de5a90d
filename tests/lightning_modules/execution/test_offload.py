"""Blocks that wait in the host's memory, and encoders: the same numbers as without."""

import pytest
import torch

from lightning_modules.blocks import blocks
from lightning_modules.execution import offload
from lightning_modules.execution.offload import HostMemory, streamed_linears
from lightning_modules.pretrained.components import Components
from lightning_modules.quantization.quantization import Quantization
from lightning_modules.timing import StageTimer
from tasks.dry_run import offloaded_bytes
from tests.support.combinations import first
from tests.support.steps import assert_same, made, step

FULL = "model.gradient_checkpointing=full"


def build(tiny, *more, adapter="lora", base="bf16"):
    return made(tiny, adapter, base, FULL, *more)


@pytest.mark.parametrize(
    ("base", "adapter"),
    first(2, [("fp8", "ortho_tlora"), ("bf16", "lora"), ("int8_w8a8", "tlora"), ("rotated", "lora")]),
)
def test_streamed_blocks_compute_the_same_bitwise(tiny, base, adapter):
    whole = step(build(tiny, adapter=adapter, base=base))
    for count in (1, 4):
        assert_same(step(build(tiny, f"model.offload.blocks={count}", adapter=adapter, base=base)), whole)


@pytest.mark.slow
def test_offloaded_bytes_are_those_of_the_dry_run(tiny):
    """They differ only by the rounding of each layer's place."""
    for base in ("bf16", "fp8", "int8_w8a8", "rotated", "nf4"):
        plain = blocks(build(tiny, base=base).transformer).values()
        sizes = [sum(layer.weight.nbytes for layer in streamed_linears(block)) for block in plain]
        source = build(tiny, "model.offload.blocks=4", base=base).base.source
        assert offloaded_bytes(source) == sum(sizes) - 2 * max(sizes)


def test_failed_pinning_leaves_no_error_to_the_next_kernel(monkeypatch, caplog):
    """CUDA reports a failed call twice: to its caller, and to whoever starts a kernel next."""
    left, unpinned = [], []

    def register(memory, device):
        if len(memory) > 512:
            left.append("operation not supported")
            raise RuntimeError(f"Registering memory failed with cudaError: {left[0]}")

    def launch_kernel(device):
        if left:
            raise RuntimeError(left.pop())

    monkeypatch.setattr(offload, "_register", register)
    monkeypatch.setattr(offload, "_launch_kernel", launch_kernel)
    monkeypatch.setattr(offload, "_unpin", lambda memory, device: unpinned.append(len(memory)))
    device = torch.device("cuda", 0)
    for size in (512, 513, 700, 256):
        HostMemory([torch.empty(size, dtype=torch.uint8)]).pin(device)
    assert unpinned == [512, 256]
    launch_kernel(device)
    [note] = [record.message for record in caplog.records]
    assert "memory cannot be pinned: Registering memory failed" in note


class Elsewhere(str):
    type = "elsewhere"


@pytest.mark.parametrize("format", [None, "nf4"])
def test_components_compute_the_same_before_and_after_they_rest(tiny, format):
    settings = None if format is None else Quantization(format, ["*.wo"], ["text_encoder_2"], False)
    places = {"vae": None, "text_encoder": None}
    parts = Components(str(tiny), None, torch.float32, places, lambda: Elsewhere("cpu"), StageTimer(), settings)

    def encode():
        with torch.no_grad():
            mean = parts["vae"].encode(torch.ones(1, 3, 16, 16)).latent_dist.mean
            return mean, parts["text_encoder_2"](torch.arange(8)[None]).last_hidden_state

    expected = encode()
    for _ in range(2):
        parts.offload_to_cpu()
        assert parts._offloaded == {"vae", "text_encoder_2"}
        assert all(map(torch.equal, expected, encode()))
        assert not parts._offloaded
