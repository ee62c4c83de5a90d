"""Commands on a tiny quantized base."""

from tests.support.commands import short
from tests.support.tiny_pipelines import FLUX

MODEL = ["model=flux_kontext_fp8", *FLUX["settings"]]


def quantized(tiny, pairs, output, steps, format, backend, *more):
    """Overrides of a short run."""
    how = [f"model.quantization.format={format}", f"model.quantization.backend={backend}"]
    return [*MODEL, *how, *short(tiny, pairs, output, steps), *more]
