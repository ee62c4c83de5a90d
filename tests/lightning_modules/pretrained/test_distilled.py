"""Bases that were distilled to few steps are said before training, and no others."""

import json
import shutil

import pytest
from hydra.utils import instantiate

from tasks.models import without_network
from tests.support.commands import compose, short

NOTE = "is distilled to few steps ("


def base_of(folder, *more):
    settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={folder}", *more]
    return instantiate(compose("train", *settings).model, _convert_="all").base


@pytest.fixture
def copy(tiny, tmp_path):
    """The tiny pipeline under another name, with other settings in a file of JSON."""

    def copy(name, file="model_index.json", **values):
        folder = tmp_path / name
        shutil.copytree(tiny, folder)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return copy


@pytest.mark.parametrize(
    ("name", "distilled"),
    [
        ("Z-Image-Turbo", True),
        ("FLUX.1-schnell", True),
        ("Qwen-Image-Lightning", True),
        ("flux2_klein_distilled", True),
        ("TURBO", True),
        ("hyper-realistic-flux", False),
        ("turbo4", True),
        ("FLUX.1-Kontext-dev", False),
        ("FLUX.1-dev", False),
        ("Qwen-Image-Edit-2511", False),
        ("FLUX.2-klein-base-4B", False),
        ("turbocharged", False),
        ("hyperion", False),
        ("superturbo", False),
    ],
)
def test_by_its_name_in_whole_words(copy, name, distilled):
    assert (base_of(copy(name)).sign_of_distillation() is not None) == distilled
    assert base_of(copy(f"lightning/{name.lower()}-copy")).sign_of_distillation() is None or distilled


def test_by_what_its_files_say(copy):
    signs = [
        base_of(copy("one", is_distilled=True)).sign_of_distillation(),
        base_of(copy("two", "transformer/config.json", is_distilled=True)).sign_of_distillation(),
        base_of(copy("three", "transformer/config.json", flow_map=True)).sign_of_distillation(),
        base_of(copy("four", _name_or_path="/hyper/FLUX.1-schnell")).sign_of_distillation(),
        base_of(copy("five", is_distilled=False, _name_or_path="/turbo/FLUX.1-dev")).sign_of_distillation(),
    ]
    assert signs == [
        "is_distilled in model_index.json",
        "is_distilled in the transformer's config.json",
        "flow_map in the transformer's config.json",
        "schnell in its name",
        None,
    ]


def test_the_transformer_counts_that_trains(tiny, copy):
    """A whole pipeline's own transformer; one alone is most often of the base's kind."""
    turbo = copy("some-turbo", is_distilled=True)
    assert base_of(turbo, f"model.transformer_name_or_path={tiny}").sign_of_distillation() is None
    assert base_of(tiny, f"model.transformer_name_or_path={turbo}").sign_of_distillation()
    assert base_of(turbo, f"model.transformer_name_or_path={tiny}/transformer").sign_of_distillation()


@pytest.mark.parametrize("model", ["flux_kontext", "flux_dev", "qwen_image_edit", "qwen_image_edit_plus", "embedded"])
def test_bases_that_are_none_are_not_called_so(model):
    """By their real names and configurations; FLUX.1's guidance was distilled, its steps were not."""
    with without_network(compose("train", f"model={model}").model) as module:
        assert module.base.sign_of_distillation() is None


def test_the_real_name_counts_where_a_model_is_known_without_the_network():
    with without_network(compose("train", "model=flux_dev").model) as module:
        module.base.name = "owner/FLUX.1-turbo"
        assert module.base.sign_of_distillation() == "turbo in its name"


@pytest.mark.slow
def test_it_is_said_once_in_training_without_a_training_adapter(run, copy, pairs, photo, trained, tmp_path):
    turbo = copy("tiny-turbo")
    text = run("train", *short(turbo, pairs, tmp_path / "run", 1)).text
    assert text.count(f"note: {turbo} {NOTE}turbo in its name)") == 1
    assert "model.sampling.transformer_name_or_path" in text
    adapted = [*short(copy("other-turbo"), pairs, tmp_path / "adapted", 1), f"model.training_adapter={trained}"]
    assert NOTE not in run("train", *adapted).text
    request = [f"image={photo}", "prompt=x", "num_inference_steps=1", f"output_dir={tmp_path / 'made'}"]
    pictures = [f"lora={trained}", f"model.sampling.transformer_name_or_path={copy('third-turbo')}", *request]
    assert NOTE not in run("predict", *pictures).text
