"""What quantizing the base costs: its velocity in each format against the unquantized one's."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.files import replacing
from lightning_modules import flow
from lightning_modules.edit_module import EditModule
from lightning_modules.quantization.quantization import Quantization, nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("retouch")

BANDS = 10


def compare_precision(
    module: EditModule, quantizations: Sequence[Quantization], batches: Sequence[LatentBatch], path: Path
) -> None:
    """Print the relative error of the velocity by timestep band for each way to quantize, and draw it.

    Args:
        module: unquantized on disk; it is left without its transformer.
        batches: of one sample each.
    """
    module.source.quantization = None
    log.info(f"{len(batches)} samples, {BANDS} timesteps each, in {1 + len(quantizations)} precisions")
    precision = str(module.base_dtype).removeprefix("torch.")
    exact, size = _velocities(module, batches)
    sizes, errors = {precision: size}, {}
    for quantization in quantizations:
        module.source.quantization = quantization
        quantized, sizes[quantization.format] = _velocities(module, batches)
        pairs = zip(quantized, exact, strict=True)
        errors[quantization.format] = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs]
    Console(stderr=True).print(_table(errors, sizes, precision))
    with replacing(path) as temporary:
        _draw(errors, precision).savefig(temporary, format="png")


@torch.no_grad()
def _velocities(module: EditModule, batches: Sequence[LatentBatch]) -> tuple[list[Tensor], int]:
    """All samples' velocities in the middle of each timestep band, flat; and what the transformer's weights take."""
    module.transformer = module.load_transformer()
    size = nbytes(module.transformer)
    module.stream_blocks()
    device, mixed = module.main_device, module.base_dtype != torch.float32
    bands: list[list[Tensor]] = [[] for _ in range(BANDS)]
    with torch.autocast(device.type, module.base_dtype) if mixed else nullcontext():
        for number, one in enumerate(batches):
            batch = module.transfer_batch_to_device(one, device, 0)
            assert batch.target_mean is not None
            x0 = module.normalize(batch.target_mean.float())
            controls = [module.normalize(control.float()) for control in batch.controls]
            eps = flow.draw(module.seed, [number], x0.shape[1:], module.timesteps, 1.0).eps.to(device)
            for band, velocities in enumerate(bands):
                t = torch.full((1,), (band + 0.5) / BANDS, device=device)
                predicted = module.velocity(flow.interpolate(x0, eps, t), t, controls, batch.prompt)
                velocities.append(predicted.float().cpu().flatten())
    module.transformer = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [torch.cat(band) for band in bands], size


def _band(number: int) -> str:
    return f"{number / BANDS:.1f} to {(number + 1) / BANDS:.1f}"


def _table(errors: Mapping[str, list[float]], sizes: Mapping[str, int], precision: str) -> Table:
    table = Table(title=f"relative error of the velocity against {precision}", title_justify="left")
    table.add_column("t")
    for name in errors:
        table.add_column(name, justify="right")
    for number in range(BANDS):
        table.add_row(_band(number), *(f"{100 * values[number]:.2f} %" for values in errors.values()))
    table.add_section()
    table.add_row("mean", *(f"{100 * sum(values) / BANDS:.2f} %" for values in errors.values()))
    table.add_row("weights", *(decimal(sizes[name]) for name in errors))
    table.caption = f"t 1 is noise; {precision} weights take {decimal(sizes[precision])}"
    return table


def _draw(errors: Mapping[str, list[float]], precision: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    middles = [(number + 0.5) / BANDS for number in range(BANDS)]
    for name, values in errors.items():
        axes.plot(middles, [100 * value for value in values], marker="o", label=name)
    axes.set(xlabel="t (1 is noise)", ylabel="relative error, %", xlim=(0, 1), ylim=(0, None))
    axes.set_title(f"velocity against {precision}")
    axes.legend()
    return figure
