"""Images by another transformer than the one that trains."""

import shutil
import weakref

import numpy as np
import pytest
import torch

from foundation.errors import UserError
from lightning_modules import sampling
from lightning_modules.family import stock_pipeline
from lightning_modules.inference import SamplingTransformer
from lightning_modules.pretrained.transformer import TransformerSource
from report.images import read_strip
from tests.support.commands import short, unloaded, weights
from tests.support.pictures import pixels, records
from tests.support.tiny_adapters import build
from tests.support.tiny_pipelines import build_pipeline, edit_json


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """Save a pipeline of the same kind with other weights and another shift."""
    folder = tmp_path_factory.mktemp("other") / "tiny-turbo"
    build_pipeline(folder, seed=9)
    edit_json(folder / "scheduler/scheduler_config.json", use_dynamic_shifting=False, shift=7.0)
    return folder


@pytest.fixture
def settings(tiny, pairs, tmp_path):
    def settings(name, *more, steps=3):
        pictures = ["callbacks.sample_images.count=1", "model.sampling.num_inference_steps=3", "sample_every=1"]
        learning = ["model.dtype=float32", "optimizer.lr=1e-1", "adapter.alpha=16", "scheduler=constant"]
        return [*short(tiny, pairs, tmp_path / name, steps, shown=True), *pictures, *learning, *more]

    return settings


def result(folder, step):
    [path] = (folder / f"samples/step-{step:06d}").glob("*.png")
    return np.asarray(read_strip(path).result).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["optimizer=adamw_schedule_free"], ["adapter=tlora"]], ids=["averaged", "tlora"])
def test_sample_images_equal_a_prediction_with_that_transformer_and_training_is_unchanged(
    run, settings, distilled, pairs, tmp_path, more, monkeypatch
):
    loaded, load = [], TransformerSource.load

    def watched(source, *arguments, **more):
        transformer = load(source, *arguments, **more)
        if source.name == str(distilled):
            assert not [one for one in loaded if one() is not None], "the one before has left"
            loaded.append(weakref.ref(transformer))
        return transformer

    with monkeypatch.context() as context:
        context.setattr(TransformerSource, "load", watched)
        run("train", *settings("with", *more, f"model.sampling.transformer_name_or_path={distilled}"))
    assert len(loaded) == 4
    run("train", *settings("without", *more))
    torch.testing.assert_close(weights(tmp_path / "with"), weights(tmp_path / "without"), rtol=0, atol=0)
    made = [result(tmp_path / "with", step) for step in (0, 3)]
    assert np.abs(made[0] - made[1]).max() > 3
    assert np.abs(made[1] - result(tmp_path / "without", 3)).max() > 3

    # The setting of images wins over that of the model, which is no transformer at all.
    where = [f"lora={tmp_path / 'with'}", f"output_dir={tmp_path / 'made'}", "trainer.accelerator=cpu"]
    prompt = (pairs / "training_images/00.txt").read_text()
    request = [f"image={pairs / 'control_images/00.png'}", f"prompt={prompt}", "num_inference_steps=3", "seed=42"]
    models = [f"model.sampling.transformer_name_or_path={distilled}", "model.transformer_name_or_path=/nowhere"]
    outcome = run("predict", *where, *request, *models)
    assert "was trained on" not in outcome.text
    assert "distilled" not in outcome.text
    assert np.abs(pixels(tmp_path / "made/00.png") - made[1]).max() <= 1
    (record,) = records(tmp_path / "made")
    assert record["transformer_name_or_path"] == str(distilled)

    page, card = (tmp_path / "with" / name for name in ("report.html", "lora/last/README.md"))
    assert f"from_pretrained(&#39;PATH_TO/{distilled.name}&#39;" in page.read_text(), "with its scheduler"
    assert card.read_text().count(f"PATH_TO/{distilled.name}") == 2
    assert str(distilled) not in card.read_text()


def test_sampling_transformer_sets_is_distilled_and_the_scheduler(tiny, distilled, tmp_path, monkeypatch):
    def pipeline(name, chosen):
        module = build(tiny, "lora", f"model.transformer_name_or_path={name}")
        kontext = stock_pipeline(module.pipeline_name)

        class Guided(kontext):
            def __init__(self, *, is_distilled=False, **parts):
                super().__init__(**parts)
                self.register_to_config(is_distilled=is_distilled)

        monkeypatch.setattr(sampling, "stock_pipeline", lambda _: Guided)
        module.sampler.use(module.transformer, module.base.source if chosen else None)
        made = module.sampler.pipeline()
        return made.config.is_distilled, made.scheduler.config.shift

    marked = tmp_path / "marked"
    shutil.copytree(distilled, marked)
    edit_json(marked / "model_index.json", is_distilled=True)
    assert pipeline("null", False) == (False, 3.0)
    assert pipeline(marked, False) == (True, 3.0)
    assert pipeline(marked, True) == (True, 7.0)
    assert pipeline(marked / "transformer", True) == (False, 3.0)


def test_incompatible_sampling_transformer_is_refused_before_the_start(
    refuses, repositories, tiny, distilled, tmp_path
):
    def refused(name):
        return refuses(f"model.sampling.transformer_name_or_path={name}")

    assert "holds a QwenImageTransformer2DModel" in refused(repositories["qwen_image_edit_plus"])
    build_pipeline(tmp_path / "wide", seed=1, heads=2)
    assert "has other layers than" in refused(tmp_path / "wide")
    assert "neither a folder here nor" in refused("no/such/folder")
    broken = tmp_path / "broken"
    shutil.copytree(distilled / "transformer", broken)
    file = broken / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert str(file) in refused(broken)
    sampled = f"model.sampling.transformer_name_or_path={distilled}"
    module = unloaded(tiny, "flux_kontext", "adapter=full", sampled)
    with pytest.raises(UserError, match="adapter=full trains no LoRA"):
        SamplingTransformer(module, str(distilled)).check()
