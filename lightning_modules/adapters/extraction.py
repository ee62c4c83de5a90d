"""A LoRA of what a fully fine-tuned transformer has learned: the best of its rank, layer by layer."""

from typing import NamedTuple

import torch

from datamodules.errors import UserError, listing
from lightning_modules.adapters.low_rank import LowRank, best_of_rank
from lightning_modules.pretrained.transformer import TransformerSource, transformer_weights
from lightning_modules.pretrained.weights import SafetensorsWeights
from lightning_modules.timing import ProgressLines


class Extracted(NamedTuple):
    """What was found.

    Attributes:
        updates: of the linear layers whose weights differ.
        errors: for each, the share of the difference (Frobenius norm) that the update lacks.
        error: the same of all of them together.
        others: names of the other tensors that differ, which a LoRA cannot hold: biases and norms.
    """

    updates: dict[str, LowRank]
    errors: dict[str, float]
    error: float
    others: list[str]


@torch.no_grad()
def extract(base: TransformerSource, tuned: str, rank: int, device: torch.device) -> Extracted:
    """The difference of two transformers, of which one layer at a time is in memory.

    Args:
        tuned: the folder or hub id of a whole pipeline or of nothing but the transformer.
        device: to compute on.

    Raises:
        UserError: they are no two transformers of one kind in 16 or 32 bits, or they do not differ.
    """
    before, after = _weights(base.repository, base.revision), _weights(tuned, None)
    if different := sorted(before.dtypes.keys() ^ after.dtypes.keys()):
        raise UserError(f"extract={tuned} is no other version of {base.name}: {listing(different)} is in one of them")
    layers = {f"{name}.weight" for name, module in base.meta.named_modules() if isinstance(module, torch.nn.Linear)}
    updates, errors, others, squares = {}, {}, [], [0.0, 0.0]
    progress = ProgressLines(len(before.dtypes), "tensors")
    for number, name in enumerate(sorted(before.dtypes), 1):
        one, other = (weights.read(name).to(device).float() for weights in (before, after))
        if one.shape != other.shape:
            raise UserError(f"extract={tuned}: {name} is {tuple(other.shape)}, in {base.name} {tuple(one.shape)}")
        difference = other - one
        if not difference.isfinite().all():
            raise UserError(f"extract={tuned}: {name} holds numbers that are not finite")
        if not difference.any():
            continue
        if name not in layers:
            others.append(name)
            continue
        layer = name.removesuffix(".weight")
        updates[layer], lost = best_of_rank(difference, rank)
        whole = float(difference.double().square().sum())
        errors[layer] = (lost / whole) ** 0.5
        squares = [squares[0] + lost, squares[1] + whole]
        progress.done(number)
    if not updates:
        raise UserError(f"extract={tuned} does not differ from {base.name} in any linear layer")
    return Extracted(updates, errors, (squares[0] / squares[1]) ** 0.5, others)


def _weights(repository: str, revision: str | None) -> SafetensorsWeights:
    weights = transformer_weights(repository, revision)
    if weights is None:
        raise UserError(f"{repository}: only safetensors weights can be compared")
    if weights.format is not None:
        raise UserError(f"{repository} is {weights.format} on disk: extract= needs both in 16 or 32 bits")
    return weights
