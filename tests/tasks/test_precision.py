"""task=quantize and task=compare_precision."""

import logging

import pytest

from tests.support.quantized import MODEL
from tests.support.tiny_pipelines import FLUX


@pytest.mark.slow
def test_precisions_are_compared(run, tiny, pairs, tmp_path, caplog):
    model = f"model.pretrained_model_name_or_path={tiny}"
    where = [model, f"data.root={pairs}", f"data.cache_dir={tmp_path / 'cache'}"]
    compare = ["task=compare_precision", "model=flux_kontext", *FLUX["settings"], *where]
    library = logging.getLogger("lightning.pytorch")
    library.setLevel(logging.INFO)  # as in a new process
    library.addHandler(caplog.handler)
    outcome = run("predict", *compare, f"output_dir={tmp_path / 'compared'}")
    library.removeHandler(caplog.handler)
    assert caplog.messages == []
    [mean] = [line for line in outcome.text.splitlines() if "mean" in line]
    fp8, fp4, nf4, int8 = (float(part) for part in mean.replace("│", " ").replace("%", " ").split()[1:])
    assert 0 < int8 < fp8 < nf4 < fp4 < 30
    assert sum(" to " in line and "%" in line for line in outcome.text.splitlines()) == 10
    assert (tmp_path / "compared" / "precision.png").stat().st_size > 10_000
    run("predict", "task=quantize", *MODEL, model, f"output_dir={tmp_path / 'fp8'}")
    again = [*compare, f"model.transformer_name_or_path={tmp_path / 'fp8'}", f"output_dir={tmp_path / 'no'}"]
    assert "needs unquantized weights" in run("predict", *again, ok=False).error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model=flux_kontext"], "task=quantize needs a model that quantizes: model=flux_kontext_fp8"),
        ([*MODEL, "model.quantization.backend=quanto"], "task=quantize cannot write quanto's layers"),
    ],
)
def test_a_transformer_that_cannot_be_written_is_one_line(run, tiny, tmp_path, settings, message):
    where = [f"model.pretrained_model_name_or_path={tiny}", f"output_dir={tmp_path / 'out'}"]
    assert message in run("predict", "task=quantize", *settings, *where, ok=False).error
    assert not (tmp_path / "out").exists()
