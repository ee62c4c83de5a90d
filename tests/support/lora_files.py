"""LoRAs of random numbers, as updates and as files."""

import torch

from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.names import LayerNames
from tests.support.commands import class_of

TARGETS = {
    "default": lambda name: name.endswith(("to_q", "to_k", "to_v", "to_out.0")),
    "all-linear": lambda name: name != "proj_out",
    "to_q": lambda name: name.endswith("to_q"),
    "single projections": lambda name: name.startswith("single") and name.endswith((".to_q", ".to_k", ".to_v", "_mlp")),
}


def layer_names(model, transformer):
    return LayerNames(transformer, class_of(model).layers.native)


def random_delta(layer, rank=2, seed=0, dora=False, size=1.0):
    """Draw a delta of a layer with `in_features` and `out_features`."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, layer.in_features, generator=generator) * size
    up = torch.randn(layer.out_features, rank, generator=generator) * size
    return LowRank(down, up, torch.rand(layer.out_features, generator=generator) + 0.5 if dora else None)


def random_updates(names, targets="default", rank=3, dora=False, seed=0, size=0.1):
    """Draw an update of each target layer."""
    chosen = [name for name in names.shapes if TARGETS[targets](name)]
    return {
        name: random_delta(names.shapes[name], rank, 1000 * seed + index, dora, size)
        for index, name in enumerate(chosen)
    }


def dense(update):
    """Return the update as a float64 matrix (out, in)."""
    return update.up.double() @ update.down.double()


def relative(one, other):
    """Return the distance of two LoRAs, over all matrices, relative to the first."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    different = whole = 0.0
    for name in dict.fromkeys([*one, *other]):  # of the real model one matrix after the other
        first, second = (dense(side[name]) if name in side else zero for side in (one, other))
        different += float((first - second).square().sum())
        whole += float(first.square().sum())
    return (different / whole) ** 0.5
