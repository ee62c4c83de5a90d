"""The useful work of a training step, which is its matrix products, and the time it takes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from datamodules.batch import LatentBatch
from datamodules.images.resizing import Size
from lightning_modules.execution.execution import Execution
from lightning_modules.family import Family
from lightning_modules.objectives.objective import ONE, Passes
from lightning_modules.pretrained.frozen_base import FrozenBase

# Share of the peak of matrix products that training reaches. FLUX Kontext at 1024 pixels with full checkpointing, on an
# H100: 0.29 eager with FlashAttention-2, 0.48 compiled (docs/speed.md).
UTILISATION = 0.4
# A caption of usual length, for families whose prompts are not padded.
CAPTION = 80 * "x"


def empty_latents(family: Family, base: FrozenBase, size: Size, samples: int, caption: str) -> LatentBatch:
    """Build a batch without content, on the meta device."""
    (target, *controls), extras = size
    config = base.source.config()
    channels = family.geometry.channels(config)

    def empty(image: tuple[int, int]) -> Tensor:
        return torch.empty(samples, channels, *base.latent_size(*image), dtype=base.dtype, device="meta")

    prompt = {
        name: torch.empty(samples, *shape, dtype=base.dtype, device="meta")
        for name, shape in family.prompt_shapes(config, caption, controls).items()
    }
    return LatentBatch(
        [""] * samples,
        [0] * samples,
        empty(target),
        empty(target),
        [empty(one) for one in controls],
        prompt,
        {},
        torch.empty(samples, 1, target[1], target[0], dtype=torch.uint8, device="meta") if "mask" in extras else None,
        rejected_mean=empty(target) if "rejected" in extras else None,
        rejected_std=empty(target) if "rejected" in extras else None,
    )


@contextmanager
def all_components(execution: Execution, samples: int, device: str) -> Iterator[None]:
    """Temporarily compute with all components of a T-LoRA, as memory and work do not depend on its mask."""
    with ExitStack() as gates:
        for gate in execution.rank_gates:
            gates.enter_context(gate.using(torch.ones(samples, gate.rows, dtype=torch.bool, device=device)))
        yield


def step_flops(execution: Execution, transformer: Any, batch: LatentBatch, passes: Passes = ONE) -> int:
    """Count the FLOPs of a training step on the meta device.

    Args:
        transformer: the transformer in float32 with its adapter; on the meta device, like the batch.
        passes: the passes of each sample; all but forward passes have gradients.
    """
    target, *controls = (latent.float() for latent in (batch.known_target, *batch.controls))
    prompt = {name: tensor.float() for name, tensor in batch.prompt.items()}
    t = torch.empty(len(target), device="meta")
    with all_components(execution, len(target), "meta"), FlopCounterMode(display=False) as counter:
        velocity = execution.family.velocity(transformer, target, t, controls, prompt)
        forward = counter.get_total_flops()
        velocity.sum().backward()
    return passes.training * counter.get_total_flops() + passes.forward * forward


def sample_flops(execution: Execution, passes: Passes, checkpointing: str, sizes: Sequence[Size]) -> float:
    """Return the FLOPs of a training step with one sample, the mean over samples of these sizes.

    A step of the largest size is counted; the others are in proportion to their tokens.

    Args:
        passes: the objective's passes of each sample.
        checkpointing: the gradient checkpointing policy; all but `none` compute the forward pass again.
    """
    if checkpointing != "none":
        passes = passes._replace(forward=passes.forward + passes.training)
    counts = Counter(sizes)
    batches = {size: empty_latents(execution.family, execution.base, size, 1, CAPTION) for size in counts}
    tokens = {size: execution.family.geometry.token_count(batch) for size, batch in batches.items()}
    largest = max(tokens, key=tokens.__getitem__)
    flops = step_flops(execution, execution.adapted_meta_transformer().float(), batches[largest], passes)
    mean_tokens = sum(count * tokens[size] for size, count in counts.items()) / len(sizes)
    return flops * mean_tokens / tokens[largest]


def duration(flops: float, peak: float) -> str:
    """Return how long a device with this peak (FLOP/s of matrix products) takes, in minutes or hours."""
    minutes = flops / (peak * UTILISATION) / 60
    return f"{minutes / 60:.1f} h" if minutes > 90 else f"{max(1, round(minutes))} min"


def matrix_peak(device: torch.device, side: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure the FLOP/s of a square product, as the device's peak."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / mean_seconds(lambda: a @ b, 20)


def mean_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the mean seconds of a call, after two that warm up; a GPU is waited for."""
    from torch.utils.benchmark import Timer  # imports setuptools

    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()).timeit(rounds).mean
