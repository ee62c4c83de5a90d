"""task=quantize and task=compare_precision."""

import pytest

from tests.support.quantized import MODEL
from tests.support.tiny_pipelines import FLUX


@pytest.mark.slow
def test_precisions_are_compared(run, tiny, pairs, tmp_path):
    model = f"model.pretrained_model_name_or_path={tiny}"
    where = [model, f"data.root={pairs}", f"data.cache_dir={tmp_path / 'cache'}"]
    compare = ["task=compare_precision", "model=flux_kontext", *FLUX["settings"], *where]
    outcome = run("predict", *compare, f"output_dir={tmp_path / 'compared'}")
    [mean] = [line for line in outcome.text.splitlines() if "mean" in line]
    fp8, fp4, nf4, int8 = (float(part) for part in mean.replace("│", " ").replace("%", " ").split()[1:])
    assert 0 < int8 < fp8 < nf4 < fp4 < 30
    assert sum(" to " in line and "%" in line for line in outcome.text.splitlines()) == 10
    text = run("predict", "task=quantize", *MODEL, model, f"output_dir={tmp_path / 'fp8'}").text
    assert "holds fp8" in text
    assert f"model.transformer_name_or_path={tmp_path / 'fp8'}" in text
    again = [*compare, f"model.transformer_name_or_path={tmp_path / 'fp8'}", f"output_dir={tmp_path / 'no'}"]
    assert "needs unquantized weights" in run("predict", *again, ok=False).error


def test_a_transformer_that_is_not_quantized_is_one_line(refuses, tiny):
    base = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}"]
    words = "task=quantize needs a model that quantizes: model=flux_kontext_fp8"
    refuses("task=quantize", *base, words=words, script="predict")
