"""task=quantize."""

import pytest

from tests.support.quantized import MODEL


@pytest.mark.slow
def test_a_transformer_is_quantized_once(run, tiny, tmp_path):
    model = f"model.pretrained_model_name_or_path={tiny}"
    text = run("predict", "task=quantize", *MODEL, model, f"output_dir={tmp_path / 'fp8'}").text
    assert "holds fp8" in text
    assert f"model.transformer_name_or_path={tmp_path / 'fp8'}" in text
    again = [*MODEL, model, f"model.transformer_name_or_path={tmp_path / 'fp8'}", f"output_dir={tmp_path / 'no'}"]
    assert "needs unquantized weights" in run("predict", "task=quantize", *again, ok=False).error


def test_a_transformer_that_is_not_quantized_is_one_line(refuses, tiny):
    base = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}"]
    words = "task=quantize needs a model that quantizes: model=flux_kontext_fp8"
    refuses("task=quantize", *base, words=words, script="predict")
