"""The minutes of a training run, by the work of its steps and the speed of a device."""

from datamodules.sizes import Sizes
from lightning_modules.estimation.activations import empty_latents
from lightning_modules.estimation.flops import Passes, StepFlops
from lightning_modules.family import Family
from lightning_modules.pretrained.frozen_base import FrozenBase

# Share of the speed of matrix products that training reaches: usual for large transformers, not measured by us.
UTILISATION = 0.4
# FLOP/s of dense bf16 products, by NVIDIA's data sheets.
CARDS = {"an RTX 4090": 165e12, "an H100": 989e12}
# Of usual length, where the prompt's tokens count.
CAPTION = 80 * "x"


def sample_flops(
    family: Family, base: FrozenBase, step_flops: StepFlops, passes: Passes, checkpointing: str, sizes: Sizes
) -> float:
    """Return the FLOPs of a training step with one sample, the mean over samples of these sizes.

    Args:
        passes: of the objective.
        checkpointing: of the gradients; none computes no forward pass again.
    """
    counts = sizes.counts()
    if checkpointing != "none":
        passes = passes._replace(forward=passes.forward + passes.training)
    flops = {size: step_flops(empty_latents(family, base, size, 1, CAPTION), passes) for size in counts}
    return sum(count * flops[size] for size, count in counts.items()) / len(sizes)


def duration(flops: float, peak: float) -> str:
    """Return how long a device takes for this much work, in minutes or hours.

    Args:
        peak: FLOP/s of its matrix products.
    """
    minutes = flops / (peak * UTILISATION) / 60
    return f"{minutes / 60:.1f} h" if minutes > 90 else f"{max(1, round(minutes))} min"
