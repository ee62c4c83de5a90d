"""A model and data, images or a repository of another kind: one clear line, and nothing is loaded."""

import pytest
from hydra.utils import instantiate

from datamodules.errors import UserError
from lightning_modules.pretrained.frozen_base import note_once
from tests.support.commands import compose
from tests.support.pictures import photograph
from tests.support.tiny_pipelines import MODELS

MISMATCHES = {
    "a caption folder for an edit model": ("flux_kontext", "cached", "flux_dev", "To train on images and captions"),
    "captions for an edit model": ("qwen_image_edit", "captions", "flux_dev", "edits images, but 0, 1, 2 and 3 more"),
    "pairs for text to image": ("flux_dev", "cached", "flux_kontext", "makes images from text only, but 0, 1, 2"),
    "an edit set as captions": ("flux_dev", "captions", "flux_kontext", "is a set of pairs"),
    "two images": ("qwen_image_edit", "cached", "qwen_image_edit_plus", "takes at most 1 condition image, but"),
}


@pytest.mark.parametrize(("model", "data", "samples_of", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_data_of_another_kind_is_one_line(refuses, repositories, datasets, model, data, samples_of, words):
    given = [f"model={model}", f"data={data}", f"model.pretrained_model_name_or_path={repositories[model]}"]
    refuses(*given, *MODELS[model].settings, root=datasets[samples_of], words=words)


@pytest.mark.parametrize(
    ("model", "images", "words"),
    [
        ("qwen_image_edit", 0, "no image= to edit, which"),
        ("qwen_image_edit", 2, "takes at most 1 condition image, but"),
        ("qwen_image_edit_plus", 4, "takes at most 3 condition images, but"),
        ("flux_dev", 1, "samples from the prompt only: leave image= out"),
    ],
)
def test_prediction_with_more_or_fewer_images_than_the_model_takes(run, repositories, tmp_path, model, images, words):
    for k in range(images):
        photograph("cat", 32, 32).save(tmp_path / (f"x_control_{k}.png" if k else "x.png"))
    settings = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}", "model.dtype=float32"]
    request = [f"image={tmp_path / 'x.png'}"] if images else ["width=32", "height=32"]
    outcome = run(
        "predict", *settings, *MODELS[model].settings, "prompt=x", *request, f"output_dir={tmp_path / 'out'}", ok=False
    )
    assert words in outcome.error
    assert "loading" not in outcome.text
    assert "interrupted" not in outcome.text


def test_repository_of_another_model_is_refused_or_said(repositories, caplog):
    def check(model, repository):
        where = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[repository]}"]
        instantiate(compose("train", *where).model).check()

    for model, repository, words in (
        ("qwen_image_edit", "flux_kontext", "has no processor, which QwenImageEdit needs: it is made for FluxKontext"),
        ("flux2_klein_4b", "flux2_dev", "reads text by a Mistral3ForConditionalGeneration"),
        ("flux2_dev", "flux2_klein_4b", "reads text by a Qwen3ForCausalLM"),
    ):
        with pytest.raises(UserError, match=words):
            check(model, repository)
    note_once.cache_clear()
    check("qwen_image_edit", "qwen_image_edit_plus")
    note = "names QwenImageEditPlusPipeline, QwenImageEdit expects QwenImageEditPipeline: check model="
    assert sum(note in message for message in caplog.messages) == 1
