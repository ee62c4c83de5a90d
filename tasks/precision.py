"""task=quantize and compare_precision: a quantized transformer on disk, and the error of each format."""

import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from datamodules.files import replacing_folder
from lightning_modules import flow
from lightning_modules.edit_module import EditModule
from lightning_modules.pretrained.weights import save_quantized
from lightning_modules.quantization.quantization import FORMATS, Quantization, nbytes
from report.quoting import program
from tasks.encode import build_cache, cached_data
from tasks.folders import require_empty
from tasks.placement import compute_device, frozen_model
from tasks.resolvers import CONF
from tasks.terminal import log, silence_libraries

# Timestep bands of equal width.
BANDS = 10
# Samples to compare on.
EXAMPLES = 4


def quantize(cfg: DictConfig, output_dir: Path) -> None:
    """Quantize the transformer and write it to output_dir, which must be empty."""
    silence_libraries()
    device = compute_device(cfg)
    module = frozen_model(cfg)
    quantization = module.base.source.quantization
    if quantization is None:
        raise UserError(
            "task=quantize needs a model that quantizes: model=flux_kontext_fp8, model/quantization=fp4, ..."
        )
    require_empty(output_dir)
    module.check()
    module.base.source.require_unquantized("task=quantize")
    transformer = module.to(device).base.load_transformer()
    with replacing_folder(output_dir) as unfinished:
        save_quantized(transformer, quantization, unfinished)
    files = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    log.info(f"{output_dir} holds {quantization.format}, {decimal(files)}")
    overrides = HydraConfig.get().overrides.task
    same = [shlex.quote(override) for override in overrides if re.match(r"model[./=](?!transformer_name)", override)]
    log.info(f"train on it: {' '.join([program('train'), *same, f'model.transformer_name_or_path={output_dir}'])}")


def compare_precision(cfg: DictConfig, _: Path) -> None:
    """Print the relative error of the velocity, by timestep band and format, on the first samples of data.root."""
    silence_libraries()  # before a trainer is created
    device = compute_device(cfg)
    module = frozen_model(cfg)
    module.check()
    module.base.source.require_unquantized("task=compare_precision")
    build_cache(cfg, data := cached_data(cfg))
    data.configure_for(module)
    data.open(data.cache(module))
    batches = list(data.one_by_one(slice(EXAMPLES), empty_prompt=False))
    log.info(f"{len(batches)} samples, {BANDS} timesteps each, in {1 + len(FORMATS)} precisions")
    exact, size = _velocities(module.to(device), None, batches)
    settings = cfg.model.quantization or OmegaConf.load(CONF / "model" / "quantization" / "fp8.yaml")
    precision = str(module.base.dtype).removeprefix("torch.")
    table = Table("t", title=f"relative error of the velocity against {precision}", title_justify="left")
    table.caption = f"t 1 is noise; {precision} weights take {decimal(size)}"
    columns = [[*(f"{band / BANDS:.1f} to {(band + 1) / BANDS:.1f}" for band in range(BANDS)), "mean", "weights"]]
    for format in FORMATS:
        table.add_column(format, justify="right")
        rotation = format == "int8_w8a8" and (settings.rotation or settings.format != format)
        quantization = instantiate(settings, format=format, components_to_quantize=["transformer"], rotation=rotation)
        quantized, size = _velocities(module, quantization, batches)
        errors = (quantized - exact).norm(dim=1) / exact.norm(dim=1)
        columns.append([*(f"{100 * error:.2f} %" for error in (*errors.tolist(), errors.mean().item())), decimal(size)])
    for number, row in enumerate(zip(*columns, strict=True)):
        table.add_row(*row, end_section=number == BANDS - 1)
    Console(stderr=True).print(table)


@torch.no_grad()
def _velocities(
    module: EditModule, quantization: Quantization | None, batches: Sequence[LatentBatch]
) -> tuple[Tensor, int]:
    """Return all samples' velocities at the middle of each timestep band (BANDS, N), and the bytes of the weights.

    Args:
        module: unquantized on disk; it does not keep the transformer.
        batches: of one sample each.
    """
    module.base.source.quantization = quantization
    transformer = module.base.load_transformer()
    size = nbytes(transformer)
    module.execution.stream_blocks(transformer)
    matching = module.flow
    device, mixed = module.base.device, module.base.dtype != torch.float32
    bands: list[list[Tensor]] = [[] for _ in range(BANDS)]
    with torch.autocast(device.type, module.base.dtype) if mixed else nullcontext():
        for index, one in enumerate(batches):
            batch = one.to(device)
            assert batch.target_mean is not None
            x0 = module.normalize(batch.target_mean.float())
            controls = [module.normalize(control.float()) for control in batch.controls]
            eps = flow.sample_noise(matching.seed, [index], x0.shape[1:], matching.timesteps, 1.0).eps.to(device)
            for band, velocities in enumerate(bands):
                t = torch.full((1,), (band + 0.5) / BANDS, device=device)
                predicted = module.velocity(transformer, flow.interpolate(x0, eps, t), t, controls, batch.prompt)
                velocities.append(predicted.float().cpu().flatten())
    del transformer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return torch.stack([torch.cat(band) for band in bands]), size
