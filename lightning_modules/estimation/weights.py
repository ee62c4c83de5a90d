"""What a transformer's weights will take, before any are loaded."""

from torch import nn

from lightning_modules.execution.offload import streamed_blocks
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.pretrained.weights import AHEAD
from lightning_modules.quantization.quantization import FORMATS


def weight_bytes(source: TransformerSource) -> int:
    """All of them; an estimate where the files are quantized."""
    wanted = source.quantization
    if wanted is not None and wanted.format == source.expected_precision:
        return wanted.nbytes(source.meta, source.dtype)
    row = FORMATS.get(source.expected_precision)
    bits = 8 * source.dtype.itemsize if row is None else row.bits
    return round(sum(parameter.numel() for parameter in source.meta.parameters()) * bits / 8)


def loading_bytes(source: TransformerSource, on_host: bool) -> int:
    """The most that the host has in memory while the transformer is loaded.

    Args:
        on_host: whether it stays there; else its streamed blocks do.
    """
    kept = weight_bytes(source) if on_host else sum(_streamed_bytes(source))
    largest = max(parameter.numel() for parameter in source.meta.parameters()) * source.dtype.itemsize
    wanted, copies = source.quantization, 0
    if wanted is not None:
        copies += AHEAD * largest
    return loading_bound(kept, largest) + copies


def loading_bound(kept: int, largest: int) -> int:
    """The most bytes that loading a model takes on the host.

    Args:
        kept: what it keeps there.
        largest: of its tensors.
    """
    return kept + kept // 10 + largest + 150_000_000


def waiting_bytes(source: TransformerSource) -> int:
    """What is in the host's memory at any time: streamed blocks, but for two that have a buffer each."""
    sizes = _streamed_bytes(source)
    return sum(sizes) - min(2, len(sizes)) * max(sizes, default=0)


def _streamed_bytes(source: TransformerSource) -> list[int]:
    """Of each streamed block."""
    plain, wanted = 8 * source.dtype.itemsize, source.quantization
    row = FORMATS.get(source.expected_precision)
    stored = plain if row is None else int(row.bits)

    def kept(name: str, part: nn.Module) -> bool:
        if wanted is None or wanted.format != source.expected_precision:
            return False
        return not wanted.converts(name, part)

    sizes = []
    for block, module in streamed_blocks(source.meta, source.streamed).items():
        linears = {f"{block}.{name}": part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        bits = (part.weight.numel() * (plain if kept(name, part) else stored) for name, part in linears.items())
        sizes.append(sum(bits) // 8)
    return sizes
