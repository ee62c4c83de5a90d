"""Promises of single models, tested by commands."""

import shutil

import pytest
import torch

from datamodules.shards.cache import Cache, Folder
from datamodules.shards.reader import LatentReader, index_of
from tests.support.pictures import photograph
from tests.support.tiny_pipelines import MODELS


@pytest.mark.slow
def test_cache_of_a_model_that_sees_images_has_a_prompt_for_each_sample(run, arguments, tmp_path):
    """Keyed by the prompt and every condition image: changing the second image encodes the prompt again."""
    model = "qwen_image_edit_plus"
    overrides = arguments(model, tmp_path / "run", 1, f"data.cache_dir={tmp_path / 'cache'}")
    root = tmp_path / "data"
    (source,) = [a.removeprefix("data.root=") for a in overrides if a.startswith("data.root=")]
    shutil.copytree(source, root)
    for text in (root / "training_images").glob("*.txt"):
        text.write_text("one instruction for all")
    arguments_here = [a for a in overrides if not a.startswith("data.root=")] + [f"data.root={root}"]
    run("train", *arguments_here)
    (folder,) = [path.parent for path in (tmp_path / "cache").glob("*/manifest.json")]
    rows = list(Cache(folder, {}).rows())
    kinds = {row["id"] for row in rows if "key" not in row}
    pictures = {tuple(sorted(p.read_bytes() for p in root.glob(f"control_images/{i}*"))) for i in range(6)}
    assert len(kinds) == 2 * len(pictures)
    photograph("cat", 32, 48).save(root / "control_images" / "0_control_1.png")
    outcome = run("train", *arguments_here[:-1], f"data.root={root}", f"output_dir={tmp_path / 'again'}")
    assert "encoded 1 sample;" in outcome.text
    samples = [one for one in index_of(Cache(folder, {}).rows()).samples.values() if one.key == "0"]
    assert len(samples) == 2
    read = LatentReader(Folder(folder), samples, empty_prompt=False)
    before, after = read([(0, 0)]), read([(1, 0)])
    assert not torch.equal(before.prompt["prompt_embeds"], after.prompt["prompt_embeds"])


def test_picture_that_is_not_finite_is_said(run, repositories, datasets, tmp_path):
    """Qwen's schedule divides by zero where there is one step."""
    model = "qwen_image_edit"
    settings = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}", "model.dtype=float32"]
    image = f"image={datasets[model] / 'control_images' / '0.png'}"
    request = [image, "prompt=x", "num_inference_steps=1", f"output_dir={tmp_path / 'out'}"]
    assert (
        "an image has values that are not finite" in run("predict", *settings, *MODELS[model].settings, *request).text
    )


def test_instance_prompt_is_learned_with_the_pictures_that_have_no_caption(run, arguments, datasets, tmp_path):
    root = shutil.copytree(datasets["flux_dev"], tmp_path / "pictures")
    (root / "0.txt").unlink()
    overrides = [a for a in arguments("flux_dev", tmp_path / "run", 1) if not a.startswith("data.root=")]
    prompt = "data.source.instance_prompt=a photo of sks rocket, [old] and 50% larger"
    where = [f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert "6 images" in run("train", *overrides, *where, prompt).text
    [folder] = [path.parent for path in (tmp_path / "cache").glob("*/manifest.json")]
    captions = {row["key"]: row["captions"] for row in Cache(folder, {}).rows() if "key" in row}
    assert captions["0"] == [prompt.partition("=")[2]]
    assert captions["1"] == ["make it snow and rain"]
