"""A model and data, images or a repository of another kind: one clear line, and nothing is loaded."""

import shutil

import pytest
from hydra.utils import instantiate

from foundation.errors import UserError
from tests.support.commands import compose
from tests.support.pictures import photograph
from tests.support.tiny_pipelines import MODELS, edit_json

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


def test_repository_of_another_model_is_refused_and_the_right_one_named(repositories):
    def check(model, repository):
        where = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[repository]}"]
        instantiate(compose("train", *where).model).check()

    for model, repository, words in (
        ("qwen_image_edit", "flux_kontext", "is made for FluxKontextPipeline: choose model=flux_kontext$"),
        ("qwen_image_edit", "qwen_image_edit_plus", "QwenImageEditPlusPipeline: choose model=qwen_image_edit_plus$"),
        ("flux2_klein_4b", "flux2_dev", "is made for Flux2Pipeline: choose model=flux2_dev$"),
        ("flux2_dev", "flux2_klein_4b", "Flux2KleinPipeline: choose model=flux2_klein_4b or flux2_klein_9b$"),
        ("z_image", "krea2", "is made for Krea2Pipeline: choose model=krea2$"),
    ):
        with pytest.raises(UserError, match=words):
            check(model, repository)


def test_variant_of_a_known_pipeline_is_used_with_one_note(repositories, tmp_path, caplog):
    """A fine-tuned model, or a pipeline of the same components; its transformer says which family it is."""

    def check(model):
        instantiate(compose("train", f"model={model}", f"model.pretrained_model_name_or_path={copy}").model).check()

    copy = shutil.copytree(repositories["flux2_klein_4b"], tmp_path / "copy")
    edit_json(copy / "model_index.json", _class_name="Flux2KleinKVPipeline")
    check("flux2_klein_4b")
    check("flux2_klein_4b")
    assert caplog.messages == [
        f"note: {copy} names Flux2KleinKVPipeline, which no model of Retouch has: it is used as a Flux2KleinPipeline"
    ]
    words = "holds a Flux2Transformer2DModel, QwenImage needs a QwenImage.*: choose model=flux2_dev or flux2_klein_4b"
    with pytest.raises(UserError, match=words):
        check("qwen_image")
