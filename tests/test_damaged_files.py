"""Files that are missing, cut short, no JSON or too large: one line with the file and what to do."""

import json
import os
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file

from datamodules.edits import EditsDataModule
from datamodules.images.captions import text_prompts
from datamodules.images.samples import Root
from datamodules.images.sources import find_samples
from foundation.errors import UserError
from foundation.files import reading
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.reading import HEADER_KEY, LoRAFile
from lightning_modules.lora_files.writing import require_finite, write
from lightning_modules.pretrained.checks import check_component, read_json
from lightning_modules.pretrained.single_file import open_file
from tests.support.commands import compose
from tests.support.harm import disk_with
from tests.support.pictures import make_pairs
from tests.support.stored import tar_members, write_tar

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


def samples_of(root):
    """Raise the line about the incomplete sample of a root as an error."""
    for line in find_samples([Root(root)]).incomplete:
        raise UserError(line)


def pairs(name):
    def make(folder):
        root = make_pairs(folder / "pairs", [(32, 32)])
        return root / name, lambda: samples_of(root)

    return make


def named(name, read):
    return lambda folder: (folder / name, lambda: read(folder / name))


def tokenizer(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    return folder / "tokenizer.json", lambda: check_component(folder, "CLIPTokenizer")


def prompts(path):
    EditsDataModule(None, None, str(path), None, [0], [1.0], None, None, 2**20, 1)


def header(*values):
    return b"GGUF" + struct.pack("<IQQ", 3, *values)


HUGE = {
    "caption": (pairs("training_images/00.txt"), b""),
    "caption of blanks": (pairs("training_images/00.caption"), b" " * 2**21),
    "caption in JSON": (pairs("training_images/00.json"), b"["),
    "table": (pairs("metadata.csv"), b"file_name,prompt\n"),
    "table of lines": (pairs("metadata.jsonl"), b"{}"),
    "prompts": (named("prompts.txt", prompts), b"x"),
    "config": (named("config.json", read_json), b"{"),
    "index": (named("diffusion_pytorch_model.safetensors.index.json", read_json), b"{"),
    "tokenizer": (tokenizer, b"{"),
    "header of a base": (named("base.safetensors", lambda path: open_file(path)), struct.pack("<Q", 2**27) + b"{"),
    "header of a LoRA": (named("lora.safetensors", LoRAFile), struct.pack("<Q", 2**27) + b"{"),
}


@pytest.mark.parametrize(("make", "start"), HUGE.values(), ids=HUGE)
def test_a_file_larger_than_its_kind_is_a_line_and_is_not_read(make, start, tmp_path):
    path, read = make(tmp_path)
    path.write_bytes(start)
    os.truncate(path, max(len(start), 700 * 2**20 if len(start) < 100 else 0))  # of a disk it takes nothing
    with pytest.raises(UserError, match=r"more than [\d,]+ bytes|header has 134,217,728 bytes") as error:
        read()
    assert path.name in str(error.value)


def test_a_caption_in_a_tar_has_the_bound_of_one_in_a_folder(tmp_path):
    tar = write_tar(tmp_path / "x.tar", tar_members([0, 1]) | {"0001.txt": b"x" * 2**21})
    [line] = find_samples([Root(tar)]).incomplete
    assert "0001.txt has more than 1,048,576 bytes" in line


@pytest.mark.parametrize("text", ["---\n" + " " * 10**5, "---\n" + "a " * 10**5, "+++\n" + " #\n" * 10**5])
def test_a_caption_that_begins_like_front_matter_is_read_in_one_go(text):
    """The number of ways to divide blanks among three patterns is that of their cubes: hours."""
    assert text_prompts(text)


def test_keys_and_words_of_a_gguf_header_are_bounded_and_a_vocabulary_is_passed_over(tmp_path):
    gguf = pytest.importorskip("gguf")
    keys = (struct.pack("<Q5sIB", 5, f"{number:05d}".encode(), 0, 1) for number in range(20_000))
    words = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**20 + 1) + bytes(8 * 2**20)
    for name, content in {"keys": header(0, 20_000) + b"".join(keys), "words": header(0, 1) + words}.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}.gguf is damaged \(its header (does not end|has an array)"):
            open_file(tmp_path / f"{name}.gguf")
    writer = gguf.GGUFWriter(tmp_path / "good.gguf", "t5")
    writer.add_token_list([f"word {number}" for number in range(32_000)])
    writer.add_token_scores([0.5] * 32_000)
    writer.add_tensor("a", torch.ones(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_file(tmp_path / "good.gguf").map("a").tolist() == torch.ones(4, 32).tolist()
