"""task=quantize: a quantized transformer on disk."""

from pathlib import Path

from omegaconf import DictConfig
from rich.filesize import decimal

from cli.folders import require_empty
from cli.placement import compute_device, frozen_model
from cli.terminal import log, silence_libraries
from foundation.errors import UserError
from foundation.files import replacing_folder
from lightning_modules.pretrained.weights import save_quantized
from report.quoting import program
from tasks.caches import given_settings


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
    module.base.source.plain_weights("task=quantize")
    transformer = module.to(device).base.load_transformer()
    with replacing_folder(output_dir) as unfinished:
        save_quantized(transformer, quantization, unfinished)
    files = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    log.info(f"{output_dir} holds {quantization.format}, {decimal(files)}")
    same = [one for one in given_settings("model") if "model.transformer_name_or_path=" not in one]
    log.info(f"train on it: {' '.join([program('train'), *same, f'model.transformer_name_or_path={output_dir}'])}")
