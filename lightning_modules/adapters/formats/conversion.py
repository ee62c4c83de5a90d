"""Updates of diffusers' layers to those of the model's own code, where several layers are one, and back."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from datamodules.errors import UserError, listing
from lightning_modules.adapters.formats.names import LayerNames, Meaning
from lightning_modules.adapters.low_rank import LowRank, swap_halves
from lightning_modules.adapters.update import Update


def split(whole: Update, meaning: Meaning, names: LayerNames) -> dict[str, Update]:
    """The updates of the layers that one name of a file stands for; a layer that it leaves alone has none.

    Raises:
        UserError: they are not what the whole is.
    """
    if len(meaning.layers) == 1 and not meaning.swapped:
        return {meaning.layers[0]: whole}
    widths = [one.out_features for one in names.sides_of(meaning.layers)]
    try:
        parts = whole.divided(widths, meaning.swapped)
    except ValueError as error:
        raise UserError(f"{listing(list(meaning.layers))}: the file holds {error}") from error
    return {layer: part for layer, part in zip(meaning.layers, parts, strict=True) if part is not None}


def as_native(updates: Mapping[str, Update], names: LayerNames) -> tuple[dict[str, Update], dict[str, str]]:
    """Name updates as the model's own code does; those without another name keep theirs.

    Returns:
        The updates, and those under diffusers' names that cannot be a part of a native layer, with the reason.
    """
    found: dict[str, Update] = {}
    done: set[str] = set()
    apart: dict[str, str] = {}
    for native, layers in names.native.items():
        present = [layer for layer in layers if layer in updates]
        if present:
            try:
                found[native] = _joined([updates.get(layer) for layer in layers], layers, names)
                done.update(present)
            except ValueError as error:
                apart |= dict.fromkeys(present, str(error))
    return found | {layer: update for layer, update in updates.items() if layer not in done}, apart


def _joined(parts: Sequence[Update | None], layers: Sequence[str], names: LayerNames) -> Update:
    """Join the updates of several layers whose outputs are a native one's; raises ValueError where they cannot be."""
    there = [part for part in parts if part is not None]
    if len(layers) == 1 and layers[0] not in names.swapped:
        return there[0]
    if not _are_loras(there):
        raise ValueError(f"{listing(list(layers))} are joined in the model's own code, as a {there[0].kind} cannot be")
    magnitude = None
    if any(part.magnitude is not None for part in there):
        if len(there) < len(parts) or any(part.magnitude is None for part in there):
            raise ValueError(f"{listing(list(layers))} are one layer in the model's own code, and only some have DoRA")
        magnitude = torch.cat([part.magnitude for part in there if part.magnitude is not None])
    if len(there) == len(parts) and all(torch.equal(part.down, there[0].down) for part in there):
        down, up = there[0].down, torch.cat([part.up for part in there])
    else:
        down = torch.cat([part.down for part in there])
        up = down.new_zeros(sum(one.out_features for one in names.sides_of(layers)), len(down))
        row = column = 0
        for layer, part in zip(layers, parts, strict=True):
            end = row + names.sides[layer].out_features
            if isinstance(part, LowRank):
                up[row:end, column : column + part.rank] = part.up
                column += part.rank
            row = end
    swapped = layers[0] in names.swapped
    return LowRank(down, swap_halves(up, swapped), None if magnitude is None else swap_halves(magnitude, swapped))


def _are_loras(updates: list[Update]) -> TypeGuard[list[LowRank]]:
    return all(isinstance(update, LowRank) for update in updates)
