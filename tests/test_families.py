"""Promises of every model, tested by commands: a new YAML and a tiny pipeline are covered automatically."""

import json

import numpy as np
import safetensors.torch
import torch
from diffusers import DiffusionPipeline
from hydra.utils import instantiate
from PIL import Image

from datamodules.pairs import collate_pixels
from lightning_modules.pretrained.frozen_base import FrozenBase
from tests.support.commands import compose
from tests.support.objectives import losses
from tests.support.stock_pictures import same_request, stock_picture
from tests.support.tiny_pipelines import MODELS, every_model, with_variants


@with_variants
def test_every_component_equals_the_stock_pipelines(arguments, repositories, tmp_path, model):
    """Weights agree bit by bit; tokenizers and processors agree in their output for a prompt."""
    module = instantiate(compose("train", *arguments(model, tmp_path / "run", 1)).model, adapter=None)
    stock = DiffusionPipeline.from_pretrained(repositories[model])
    module.configure_model()
    parts = {name: module.base.components[name] for name in (*module.text_components, "vae", "scheduler")}
    parts["transformer"] = module.transformer
    assert parts.keys() == {name for name, part in stock.components.items() if part is not None}
    for name, part in parts.items():
        other = stock.components[name]
        assert type(part) is type(other)
        if isinstance(part, torch.nn.Module):
            own, theirs = part.state_dict(), other.state_dict()
            assert own.keys() == theirs.keys()
            assert all(torch.equal(own[key], theirs[key]) for key in own)
        elif name == "scheduler":
            assert dict(part.config) == dict(other.config)
        else:
            own, theirs = (torch.as_tensor(one(text=["make it snow"]).input_ids) for one in (part, other))
            assert torch.equal(own, theirs)


@with_variants
def test_trained_lora_gives_the_same_picture_in_predict_and_in_the_stock_pipeline(
    run, arguments, repositories, datasets, tmp_path, monkeypatch, model
):
    settings = ["adapter.alpha=7", "adapter.target_modules=all-linear", "optimizer.lr=3e-2", "data.batch_size=2"]
    run("train", *arguments(model, tmp_path / "run", 4, *settings))
    monkeypatch.chdir(tmp_path)
    call, request = same_request(model, datasets[model])
    run("predict", f"lora={tmp_path / 'run'}", "prompt=make it snow", "output_dir=out", *request)
    (picture,) = (tmp_path / "out").glob("*.png")
    lora = tmp_path / "run" / "lora" / "last"
    stock = stock_picture(repositories[model], lora, monkeypatch, prompt="make it snow", **call)
    without = stock_picture(repositories[model], None, monkeypatch, prompt="make it snow", **call)
    own = np.asarray(Image.open(picture)).astype(int)
    assert np.abs(own - (stock * 255).round().astype(int)).max() <= 1
    assert np.abs(own - without * 255).max() > 8


@every_model
def test_cached_training_gives_the_loss_of_pixels(run, arguments, tmp_path, model):
    """Encoded in the step, and read from shards: the same batch, with and without the caption."""
    overrides = arguments(model, tmp_path / "run", 1, "data.caption_dropout_rate=0.5")
    run("train", *overrides)
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    module.configure_model()
    data.configure_for(module)
    cache = data.cache(module)
    data.open(cache)
    assert len(data.samples) == 6
    raw = instantiate(compose("train", *overrides, "data.cache_dir=null").data)
    raw.configure_for(module)
    raw.scan()
    alike = range(4)  # these are of one size
    local = data.reader(empty_prompt=True)([(i, i) for i in alike])
    pixels = collate_pixels(raw.pixels(4))
    pixels.draws = local.draws = list(range(4))
    with torch.no_grad():
        for rate in (0.0, 0.5, 1.0):
            module.flow.caption_dropout_rate = rate
            expected = losses(module, module.encoder(pixels, ""))
            torch.testing.assert_close(losses(module, local), expected, rtol=1e-5, atol=1e-6)


@every_model
def test_bf16_base_trains_a_float32_adapter_and_predicts_as_the_stock_pipeline(
    run, arguments, repositories, datasets, tmp_path, monkeypatch, model
):
    """The models' own dtype: everything that the stock pipeline rounds is rounded alike."""
    overrides = [a for a in arguments(model, tmp_path / "run", 2, "optimizer.lr=1e-2") if a != "model.dtype=float32"]
    run("train", *overrides)
    lora = tmp_path / "run" / "lora" / "last"
    dtypes = {t.dtype for t in safetensors.torch.load_file(lora / "pytorch_lora_weights.safetensors").values()}
    assert dtypes == {torch.float32}
    call, request = same_request(model, datasets[model])
    run("predict", f"lora={tmp_path / 'run'}", "prompt=make it snow", f"output_dir={tmp_path / 'out'}", *request)
    (picture,) = (tmp_path / "out").glob("*.png")
    stock = stock_picture(repositories[model], lora, monkeypatch, torch.bfloat16, prompt="make it snow", **call)
    own = np.asarray(Image.open(picture)).astype(int)
    assert np.abs(own - (stock * 255).round().astype(int)).max() <= 1


def test_text_encoders_have_left_before_the_transformer_comes(run, repositories, tmp_path, monkeypatch):
    loaded_before, load = [], FrozenBase.load_transformer

    def watch(base):
        loaded_before.append(set(base.components.models()))
        return load(base)

    monkeypatch.setattr(FrozenBase, "load_transformer", watch)
    settings = [
        "model=z_image",
        f"model.pretrained_model_name_or_path={repositories['z_image']}",
        "model.dtype=float32",
    ]
    request = ["width=32", "height=32", "prompt=[make it snow,make it rain]", "num_inference_steps=1"]
    run("predict", *settings, *MODELS["z_image"].settings, *request, f"output_dir={tmp_path / 'out'}")
    assert loaded_before == [set()]
    for line in (tmp_path / "out" / "predictions.jsonl").open():
        assert json.loads(line)["seconds"]["encode_prompt"] > 0
