"""LoKr and LoHa by the real command lines: trained, gone on with, read back, merged, exported."""

import re
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.applied import load_adapter
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.combinations import first
from tests.support.commands import lora_bytes, run_task
from tests.support.other_adapters import KINDS, OTHERS, short_of
from tests.support.pictures import pixels
from tests.support.quantized import quantized
from tests.support.tiny_adapters import build, learn, velocity
from tests.test_predict import stock_picture

DORA = ["adapter=dora", "adapter.rank=4", "adapter.alpha=8"]
LEARNS = ["scheduler=constant", "optimizer.lr=2e-2"]
FILE = "lora/last/pytorch_lora_weights.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "format"), [("lokr", "nf4"), ("dora", "fp8"), ("loha", "int8_w8a8")])
def test_run_resumes_bitwise_and_predicts_on_quantized_bases(run, tiny, pairs, tmp_path, adapter, format):
    """The prediction quantizes the same layers, by the file's header."""
    keep = "model.quantization.modules_to_not_convert=['transformer_blocks.*',proj_out]"

    def arguments(name, steps, *more):
        made = quantized(tiny, pairs, tmp_path / name, steps, format, keep, *LEARNS, *more)
        return [*made, *DORA] if adapter == "dora" else short_of(made, adapter)

    run("train", *arguments("whole", 3))
    run("train", *arguments("parts", 2))
    run("train", *arguments("parts", 3, "ckpt_path=last"))
    assert lora_bytes(tmp_path / "whole") == lora_bytes(tmp_path / "parts")
    assert lora_bytes(tmp_path / "whole") != lora_bytes(tmp_path / "parts", "step-000002")
    assert LoRAFile(tmp_path / "whole" / FILE).header["base_precision"] == format
    image = pairs / "control_images" / "00.png"
    asked = [f"image={image}", "prompt=x", "num_inference_steps=1", "lora_scale=[0,1]"]
    outcome = run("predict", f"lora={tmp_path / 'whole'}", *asked, f"output_dir={tmp_path / 'with'}")
    assert f"to {format}" in outcome.text
    assert all("far from about 1024x1024" in line for line in outcome.text.splitlines() if "note: " in line)
    off, on = (pixels(path) for path in sorted((tmp_path / "with").glob("*.png")))
    assert (off != on).any()


KEYS = {
    "lokr": {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
    "lokr_full": {"lokr_w1", "lokr_w2"},
    "lokr_even": {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
    "loha": {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},
}


@pytest.mark.parametrize("adapter", first(1, OTHERS))
def test_image_of_the_file_equals_the_stock_pipelines(run, stock, gallery, photo, tmp_path, adapter):
    """diffusers reads LoKr itself; `load_adapter` loads the others into its transformer."""
    folder, text = gallery(adapter).folder, gallery(adapter).text
    state = safetensors.torch.load_file(folder / FILE)
    ends = {re.sub(r".*\.(to_\w+|add_\w+|0|2|proj|proj_mlp)\.(?=[hlo])", "", key) for key in state}
    assert ends == KEYS[adapter]
    assert all(key.startswith("transformer.") for key in state)
    assert "it loads in ComfyUI" in text
    assert ("pipe.transformer.load_lora_adapter" in text) == adapter.startswith("lokr")
    asked = [f"lora={folder}", f"image={photo}", "prompt=x", "num_inference_steps=2"]
    run("predict", *asked, f"output_dir={tmp_path / 'made'}")
    picture = partial(stock_picture, stock, photo, "x", num_inference_steps=2)
    unadapted = picture()
    if adapter.startswith("lokr"):
        stock.transformer.load_lora_adapter((folder / FILE).parent, prefix="transformer", use_safetensors=True)
    else:
        load_adapter(stock.transformer, folder)
    expected = picture()
    assert np.abs(expected - unadapted).max() > 5
    assert np.abs(pixels(tmp_path / "made" / "photo.png") - expected).max() <= 1


@pytest.mark.slow
def test_files_are_exported_with_what_is_lost(gallery, tmp_path):
    lokr, loha = (gallery(kind).folder for kind in KINDS)
    text = run_task("export", f"lora={loha}", "rank=8", f"output_dir={tmp_path / 'low'}")
    assert "rank=8: the update changes by" in text
    file = LoRAFile(tmp_path / "low" / "pytorch_lora_weights.safetensors")
    assert {update.kind for update in file.empty.values()} == {"LoRA"}
    assert file.adapter["rank"] == file.adapter["alpha"] == 8
    for words, *more in (
        ("format=kohya: a LoHa cannot be written in it. Choose format=diffusers", f"lora={loha}", "format=kohya"),
        ("is a LoKr, and only plain LoRAs can be added up", f"merge=[{lokr},{loha}]"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            run_task("export", *more, f"output_dir={tmp_path / 'no'}")


@pytest.mark.parametrize("adapter", KINDS)
def test_training_starts_from_lokr_and_loha_files(tiny, tmp_path, adapter):
    module = build(tiny, adapter)
    learn(module)
    module.adapter.write(tmp_path, module.adapter.gather(module.trained.parts), module.base, {}, torch.float32)
    start = f"adapter.init_from={tmp_path / 'pytorch_lora_weights.safetensors'}"
    with torch.no_grad():
        torch.testing.assert_close(velocity(build(tiny, adapter, start), [0.5]), velocity(module, [0.5]))
    with pytest.raises(UserError, match="by the settings a"):
        build(tiny, adapter, start, "adapter.rank=3")


@pytest.mark.parametrize(
    ("model", "adapter"),
    first(1, [("z_image", "loha"), ("qwen_image_edit", "lokr"), ("longcat_image_edit", "loha")]),
)
def test_other_families_train_and_predict(run, arguments, photo, tmp_path, model, adapter):
    settings = short_of(arguments(model, tmp_path / "run", 2), adapter)
    run("train", *settings, *LEARNS)
    image = [] if model == "z_image" else [f"image={photo}"]
    asked = [f"lora={tmp_path / 'run'}", "prompt=x", "num_inference_steps=2", *image, "height=32", "width=48"]
    run("predict", *asked, "lora_scale=[0,1]", f"output_dir={tmp_path / 'out'}")
    off, on = (pixels(path) for path in sorted((tmp_path / "out").glob("*.png")))
    assert (off != on).any()


@pytest.mark.parametrize(("adapter", "frozen"), [("lokr", "lora"), ("lora", "lokr")])
def test_an_adapter_and_a_training_adapter_on_the_same_layers_keep_their_names(
    tiny, trained, gallery, tmp_path, adapter, frozen
):
    file = trained if frozen == "lora" else gallery(frozen).folder
    module = build(tiny, adapter, f"model.training_adapter={file}", dtype="bfloat16")
    learn(module)
    updates, names = module.adapter.deltas(module.transformer), module.base.layer_names
    assert updates.keys() <= names.shapes.keys()
    module.adapter.write(tmp_path, module.adapter.gather(module.trained.parts), module.base, {}, torch.float32)
    assert module.adapter.check_written(tmp_path, module.base)
    module.adapter.lr_pattern = {"*.to_q": 0.5}
    factors = {name: module.adapter.lr_factor(name) for name in trainable(module.transformer)}
    assert {name for name, factor in factors.items() if factor == 0.5} == {name for name in factors if ".to_q." in name}
    assert set(factors.values()) == {0.5, 1.0}
