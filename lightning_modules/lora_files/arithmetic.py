"""Arithmetic of LoRAs: sums, differences and relative changes of their deltas."""

from collections.abc import Mapping, Sequence

import torch

from lightning_modules.lora_files.delta import Delta, LowRank


def squared_difference(one: Delta, other: Delta) -> float:
    """Return the squared Frobenius norm of the difference of two deltas of one layer."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, -other.up)))
        return max(LowRank(torch.cat(downs), torch.cat(ups, dim=1)).square(), 0.0)
    return float((one.matrix().double() - other.matrix().double()).square().sum())


def relative_change(before: Mapping[str, Delta], after: Mapping[str, Delta]) -> float:
    """Return the norm of the difference of two LoRAs relative to the first, over all layers.

    A layer that only one of them has counts as zero in the other.
    """
    whole = sum(one.square() for one in before.values())
    different = sum(squared_difference(one, after[name]) for name, one in before.items() if name in after)
    different += sum(before[name].square() for name in before.keys() - after.keys())
    different += sum(after[name].square() for name in after.keys() - before.keys())
    return (different / whole) ** 0.5 if whole else 0.0


def weighted_sum(loras: Sequence[Mapping[str, LowRank]], weights: Sequence[float]) -> dict[str, LowRank]:
    """Return the exact weighted sum of LoRAs, by layer; layers and ranks may differ, and ranks add up."""
    names = dict.fromkeys(name for lora in loras for name in lora)
    found = {}
    for name in names:
        terms = [lora[name].scaled(weight) for lora, weight in zip(loras, weights, strict=True) if name in lora]
        down, up = torch.cat([one.down for one in terms]), torch.cat([one.up for one in terms], dim=1)
        found[name] = terms[0] if len(terms) == 1 else LowRank(down, up)
    return found
