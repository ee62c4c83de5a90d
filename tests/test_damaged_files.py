"""Files of a base or of a LoRA that are missing, cut short or no JSON: one line with the file and what to do."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file

from foundation.errors import UserError
from foundation.files import reading
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.reading import HEADER_KEY, LoRAFile
from lightning_modules.lora_files.writing import require_finite, write
from tests.support.commands import compose
from tests.support.harm import disk_with

TRANSFORMER = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(repositories, tmp_path):
    """A model's folder, to be damaged; and a module for it."""

    def copy(model="flux_kontext"):
        folder = tmp_path / "base"
        shutil.copytree(repositories[model], folder)

        def module(*more):
            cfg = compose(
                "train", f"model={model}", "model.dtype=float32", f"model.pretrained_model_name_or_path={folder}", *more
            )
            return instantiate(cfg.model, _convert_="all")

        return folder, module

    return copy


def check(module):
    module.check()
    module.base.check_files()


def without_vocabulary(folder):
    for name in ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)


def cut_short(name):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("model", "component", "damage", "message"),
    [
        ("flux_kontext", "tokenizer_2", without_vocabulary, "lacks tokenizer.json, or spiece.model, or vocab.json and"),
        ("qwen_image_edit", "processor", without_vocabulary, "lacks tokenizer.json, or spiece.model, or vocab.json"),
        ("flux_kontext", "tokenizer", cut_short("tokenizer.json"), "tokenizer.json is damaged ("),
        ("flux_kontext", "text_encoder_2", cut_short("model.safetensors"), "model.safetensors is damaged ("),
        ("flux_kontext", "vae", lambda folder: (folder / TRANSFORMER).unlink(), "vae lacks its weights"),
        ("flux_kontext", "transformer", written("config.json", "[]"), "config.json is damaged (no JSON object)"),
        ("flux_kontext", ".", written("model_index.json", "{"), "model_index.json is damaged ("),
    ],
)
def test_a_damaged_component_is_named_before_anything_is_loaded(copy, model, component, damage, message):
    folder, module = copy(model)
    check(module())
    damage(folder / component)
    with pytest.raises(UserError) as raised:
        check(module())
    assert message in str(raised.value)
    assert str(folder) in str(raised.value)
    assert "download it again" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("component", ["text_encoder_2", "transformer"])
def test_a_tensor_that_a_base_lacks_is_not_made_up(copy, component):
    """Libraries fill it with random numbers, and say so in a log."""
    folder, module = copy()
    path = next((folder / component).glob("*.safetensors"))
    state = load_file(path)
    name = next(name for name, tensor in state.items() if tensor.ndim == 2 and "shared" not in name)
    del state[name]
    save_file(state, path, {"format": "pt"})
    base = module().base
    with pytest.raises(UserError, match=r"lacks .*download it again|lacks .*is it complete") as raised:
        base.components[component] if component != "transformer" else base.load_transformer()
    assert name.rpartition(".")[0] in str(raised.value)


@pytest.mark.parametrize("text", ["no JSON", '{"adapter": 3, "model": {}}'])
def test_an_invalid_header_is_named(tmp_path, text):
    path = tmp_path / "lora.safetensors"
    save_file({"transformer.x.lora_A.weight": torch.ones(2, 2)}, path, {HEADER_KEY: text})
    with pytest.raises(UserError, match=r"lora.safetensors is damaged \(.*\); name a LoRA's") as raised:
        LoRAFile(path).header  # noqa: B018 (reads it)
    assert "\n" not in str(raised.value)


def test_weights_that_are_not_finite_do_not_replace_others(tmp_path):
    path = tmp_path / "lora.safetensors"
    good = LowRank(torch.ones(2, 2), torch.ones(2, 2))
    write(path, {"x": good}, {})
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"not finite \(transformer.x.lora_B.weight\) and are not saved"):
        write(path, {"x": replace(good, up=torch.full((2, 2), torch.inf))}, {})
    assert path.read_bytes() == before
    require_finite({"x": good.up}, "stop")


def test_task_quantize_on_a_full_disk_leaves_nothing_and_can_be_tried_again(run, repositories, tmp_path):
    out = tmp_path / "quantized"
    arguments = ["task=quantize", "model=flux_kontext_fp8", f"output_dir={out}"]
    arguments.append(f"model.pretrained_model_name_or_path={repositories['flux_kontext']}")
    with disk_with(50_000):
        assert f"cannot write {out}" in run("predict", *arguments, ok=False).error
    assert not list(tmp_path.rglob("*config.json"))
    run("predict", *arguments)
    assert json.loads((out / "config.json").read_text())["quantization_config"]


def test_memory_that_is_short_is_no_damage(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), reading(tmp_path, "download it again"):
        raise torch.OutOfMemoryError("CUDA out of memory")
