"""Bases that were distilled to few steps are named before training, and no others."""

import json
import shutil

import pytest
from hydra.utils import instantiate

from tasks.models import without_network
from tests.support.commands import compose, short

NOTE = "is distilled to few steps ("


def sign(folder, *more):
    settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={folder}", *more]
    return instantiate(compose("train", *settings).model, _convert_="all").base.sign_of_distillation()


@pytest.fixture
def copy(tiny, tmp_path):
    """Copies the tiny pipeline to another name, with other values in one of its JSON files."""

    def copy(name, file="model_index.json", **values):
        folder = shutil.copytree(tiny, tmp_path / name)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return copy


@pytest.mark.parametrize(
    ("names", "distilled"),
    [
        (["Z-Image-Turbo", "FLUX.1-schnell", "Qwen-Image-Lightning", "klein_distilled", "turbo4"], True),
        (["hyper-realistic-flux", "FLUX.1-Kontext-dev", "FLUX.2-klein-base-4B", "turbocharged", "superturbo"], False),
    ],
)
def test_by_its_name_in_whole_words(tiny, tmp_path, names, distilled):
    for name in names:
        (tmp_path / name).symlink_to(tiny)
        assert (sign(tmp_path / name) is not None) == distilled


@pytest.mark.parametrize(
    ("file", "values", "expected"),
    [
        ("model_index.json", {"is_distilled": True}, "is_distilled in model_index.json"),
        ("transformer/config.json", {"is_distilled": True}, "is_distilled in the transformer's config.json"),
        ("model_index.json", {"_name_or_path": "/hyper/FLUX.1-schnell"}, "schnell in its name"),
        ("model_index.json", {"is_distilled": False, "_name_or_path": "/turbo/FLUX.1-dev"}, None),
    ],
)
def test_by_its_files(copy, file, values, expected):
    assert sign(copy("one", file, **values)) == expected


def test_the_transformer_counts_that_trains(tiny, copy):
    """A whole pipeline's own transformer; a transformer only is most often of the base's kind."""
    turbo = copy("some-turbo", is_distilled=True)
    assert sign(turbo, f"model.transformer_name_or_path={tiny}") is None
    assert sign(tiny, f"model.transformer_name_or_path={turbo}")
    assert sign(turbo, f"model.transformer_name_or_path={tiny}/transformer")


@pytest.mark.parametrize("model", ["flux_kontext", "flux_dev", "qwen_image_edit", "qwen_image_edit_plus", "embedded"])
def test_known_bases_are_not_distilled_unless_renamed(model):
    """Real names and configurations are tested; FLUX.1's guidance was distilled, its steps were not."""
    with without_network(compose("train", f"model={model}").model) as module:
        assert module.base.sign_of_distillation() is None
        module.base.name = "owner/FLUX.1-turbo"
        assert module.base.sign_of_distillation() == "turbo in its name"


@pytest.mark.slow
def test_it_is_said_once_in_training_without_a_training_adapter(run, copy, pairs, trained, tmp_path):
    turbo = copy("tiny-turbo")
    text = run("train", *short(turbo, pairs, tmp_path / "run", 1)).text
    assert text.count(f"note: {turbo} {NOTE}turbo in its name)") == 1
    adapted = [*short(copy("other-turbo"), pairs, tmp_path / "adapted", 1), f"model.training_adapter={trained}"]
    assert NOTE not in run("train", *adapted).text
