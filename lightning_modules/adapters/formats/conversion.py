"""Updates of diffusers' layers to those of the model's own code, where several layers are one, and back."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from datamodules.errors import UserError, listing
from lightning_modules.adapters.formats.names import LayerNames, Meaning, swap_halves
from lightning_modules.adapters.low_rank import LowRank, probe


def split(whole: LowRank, meaning: Meaning, names: LayerNames) -> dict[str, LowRank]:
    """The updates of the layers that one name of a file stands for.

    Of several layers each has the components that reach it; where there are none, it has no update.

    Raises:
        UserError: they are not what the whole is.
    """
    if len(meaning.layers) == 1 and not meaning.swapped:
        return {meaning.layers[0]: whole}
    sides = names.sides_of(meaning.layers)
    magnitudes: list[Tensor | None] = [None] * len(sides)
    if whole.magnitude is not None:
        magnitudes = list(meaning.split(whole.magnitude, sides))
    found = {}
    for layer, up, magnitude in zip(meaning.layers, meaning.split(whole.up, sides), magnitudes, strict=True):
        used = (up != 0).any(dim=0)
        if len(meaning.layers) > 1 and whole.up.any():
            if not used.any():
                if magnitude is None:
                    continue
                used[0] = True  # its rows are scaled all the same
            found[layer] = LowRank(whole.down[used].contiguous(), up[:, used].contiguous(), magnitude)
        else:
            found[layer] = LowRank(whole.down, up.contiguous(), magnitude)
    _require_same(whole, meaning, found, names)
    return found


def _require_same(whole: LowRank, meaning: Meaning, found: Mapping[str, LowRank], names: LayerNames) -> None:
    x = probe(whole.down.shape[1])
    expected = swap_halves(whole.apply(x), meaning.swapped)
    rows = [
        found[layer].apply(x) if layer in found else x.new_zeros(names.sides[layer].out_features)
        for layer in meaning.layers
    ]
    if not torch.allclose(torch.cat(rows), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
        raise UserError(f"{listing(list(meaning.layers))}: what was read is not what the file holds; please report it")


def as_native(updates: Mapping[str, LowRank], names: LayerNames) -> dict[str, LowRank]:
    """The updates by the names of the model's own code; those without another name keep theirs."""
    found, done = {}, set()
    for native, layers in names.native.items():
        present = [layer for layer in layers if layer in updates]
        if present:
            found[native] = _joined([updates.get(layer) for layer in layers], layers, names)
            done.update(present)
    return found | {layer: update for layer, update in updates.items() if layer not in done}


def _joined(parts: Sequence[LowRank | None], layers: Sequence[str], names: LayerNames) -> LowRank:
    """The update of a layer whose outputs are those of several, one after the other."""
    there = [part for part in parts if part is not None]
    magnitude = None
    if any(part.magnitude is not None for part in there):
        if any(part is None or part.magnitude is None for part in parts):
            raise UserError(
                f"{listing(list(layers))} are one layer in the model's own code, and only some of them have DoRA: "
                "choose format=diffusers"
            )
        magnitude = torch.cat([part.magnitude for part in there if part.magnitude is not None])
    if len(there) == len(parts) and all(torch.equal(part.down, there[0].down) for part in there):
        down, up = there[0].down, torch.cat([part.up for part in there])
    else:
        down = torch.cat([part.down for part in there])
        up = down.new_zeros(sum(one.out_features for one in names.sides_of(layers)), len(down))
        row = column = 0
        for layer, part in zip(layers, parts, strict=True):
            end = row + names.sides[layer].out_features
            if part is not None:
                up[row:end, column : column + part.rank] = part.up
                column += part.rank
            row = end
    swapped = layers[0] in names.swapped
    return LowRank(down, swap_halves(up, swapped), None if magnitude is None else swap_halves(magnitude, swapped))
