"""Bases that were distilled to few steps are named before training, and no others."""

import shutil

import pytest

from tasks.models import without_network
from tests.support.commands import compose, short, unloaded
from tests.support.tiny_pipelines import edit_json

NOTE = "is distilled to few steps ("


def sign(folder, *more):
    return unloaded(folder, "flux_kontext", *more).base.sign_of_distillation()


@pytest.fixture
def copy(tiny, tmp_path):
    """Copies the tiny pipeline to another name, with other values in one of its JSON files."""

    def copy(name, file="model_index.json", **values):
        folder = shutil.copytree(tiny, tmp_path / name)
        edit_json(folder / file, **values)
        return folder

    return copy


@pytest.mark.parametrize(
    ("name", "file", "values", "expected"),
    [
        ("Z-Image-Turbo", "model_index.json", {}, "Turbo in its name"),
        ("klein_distilled", "model_index.json", {}, "distilled in its name"),
        ("hyper-realistic-flux", "model_index.json", {}, None),
        ("turbocharged", "model_index.json", {}, None),
        ("one", "transformer/config.json", {"is_distilled": True}, "is_distilled in the transformer's config.json"),
        ("one", "model_index.json", {"_name_or_path": "/hyper/FLUX.1-schnell"}, "schnell in its name"),
        ("one", "model_index.json", {"is_distilled": False, "_name_or_path": "/turbo/FLUX.1-dev"}, None),
    ],
)
def test_by_its_name_in_whole_words_and_by_its_files(copy, name, file, values, expected):
    assert sign(copy(name, file, **values)) == expected


@pytest.mark.parametrize("model", ["flux_dev", "qwen_image_edit_plus"])
def test_known_bases_are_not_distilled(model):
    assert without_network(compose("train", f"model={model}").model).base.sign_of_distillation() is None


def test_the_transformer_counts_that_trains(tiny, copy):
    """A whole pipeline's own transformer; a transformer only is most often of the base's kind."""
    turbo = copy("some-turbo", is_distilled=True)
    assert sign(turbo, f"model.transformer_name_or_path={tiny}") is None
    assert sign(tiny, f"model.transformer_name_or_path={turbo}")
    assert sign(turbo, f"model.transformer_name_or_path={tiny}/transformer")


@pytest.mark.slow
def test_distilled_base_is_noted_once_in_training_without_a_training_adapter(run, copy, pairs, trained, tmp_path):
    turbo = copy("tiny-turbo")
    text = run("train", *short(turbo, pairs, tmp_path / "run", 1)).text
    assert text.count(f"note: {turbo} {NOTE}turbo in its name)") == 1
    adapted = [*short(copy("other-turbo"), pairs, tmp_path / "adapted", 1), f"model.training_adapter={trained}"]
    assert NOTE not in run("train", *adapted).text
