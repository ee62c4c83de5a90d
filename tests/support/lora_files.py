"""LoRAs of random numbers, as updates and as files."""

import torch

from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.native_names import NO_NATIVE_NAMES

NATIVE = {"flux_kontext": NATIVE_NAMES, "qwen_image_edit": NO_NATIVE_NAMES}
TARGETS = {
    "default": lambda name: name.endswith(("to_q", "to_k", "to_v", "to_out.0")),
    "all-linear": lambda name: name != "proj_out",
    "to_q": lambda name: name.endswith("to_q"),
    "single projections": lambda name: name.startswith("single") and name.endswith((".to_q", ".to_k", ".to_v", "_mlp")),
}


def layer_names(model, transformer):
    """All names of a transformer's layers."""
    return LayerNames(transformer, NATIVE[model])


def random_updates(names, targets="default", rank=3, dora=False, seed=0, size=0.1):
    """An update of each layer that is a target."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator)

    return {
        name: LowRank(
            numbers(rank, sides.in_features) * size,
            numbers(sides.out_features, rank) * size,
            numbers(sides.out_features).abs() + 0.5 if dora else None,
        )
        for name, sides in names.sides.items()
        if TARGETS[targets](name)
    }


def dense(update):
    """(out, in), in float64."""
    return update.up.double() @ update.down.double()


def relative(one, other):
    """How far two LoRAs are apart, by whole matrices, as a share of the first one."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    different = whole = 0.0
    for name in dict.fromkeys([*one, *other]):  # of the real model one matrix after the other
        first, second = (dense(side[name]) if name in side else zero for side in (one, other))
        different += float((first - second).square().sum())
        whole += float(first.square().sum())
    return (different / whole) ** 0.5
