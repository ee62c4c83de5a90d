"""Promises of single models, tested by commands."""

import shutil

from hydra.utils import instantiate

from cli.arguments import quote_values
from tasks.encode import build_cache
from tests.support.commands import compose
from tests.support.tiny_pipelines import MODELS


def test_image_that_is_not_finite_is_one_line(run, repositories, datasets, tmp_path):
    """Qwen's schedule divides by zero where there is one step."""
    model = "qwen_image_edit"
    settings = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}", "model.dtype=float32"]
    image = f"image={datasets[model] / 'control_images' / '0.png'}"
    request = [image, "prompt=x", "num_inference_steps=1", f"output_dir={tmp_path / 'out'}"]
    assert (
        "an image has values that are not finite" in run("predict", *settings, *MODELS[model].settings, *request).text
    )


def test_instance_prompt_is_learned_with_images_that_have_no_caption(arguments, datasets, tmp_path):
    root = shutil.copytree(datasets["flux_dev"], tmp_path / "pictures")
    (root / "0.txt").unlink()
    overrides = [a for a in arguments("flux_dev", tmp_path / "run", 1) if not a.startswith("data.root=")]
    prompt = "data.source.instance_prompt=a photo of sks rocket, [old] and 50% larger"
    where = [f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"]
    cfg = compose("train", *overrides, *where, *quote_values([prompt]))
    cache = build_cache(cfg, instantiate(cfg.data))
    captions = {row["key"]: row["captions"] for row in cache.rows() if "key" in row}
    assert len(captions) == 6
    assert captions["0"] == [prompt.partition("=")[2]]
    assert captions["1"] == ["make it snow and rain"]
