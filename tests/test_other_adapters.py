"""LoKr, LoHa and OFT by the real command lines: trained, gone on with, read back, merged, exported."""

import re
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.applied import TrainingAdapter, load_adapter
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.combinations import first
from tests.support.commands import lora_bytes, short
from tests.support.other_adapters import KINDS, OTHERS, short_of
from tests.support.pictures import pixels
from tests.support.quantized import quantized
from tests.support.same_runs import SMOOTH_ADAM, assert_close
from tests.support.several_runs import DDP, FSDP
from tests.support.steps import BASES, step
from tests.support.tiny_adapters import build, learn, velocity
from tests.test_predict import stock_picture

DORA = ["adapter=dora", "adapter.rank=4", "adapter.alpha=8"]
LEARNS = ["scheduler=constant", "optimizer.lr=2e-2"]
FILE = "lora/last/pytorch_lora_weights.safetensors"


@pytest.mark.parametrize(
    ("adapter", "format"), first(1, [("lokr", "nf4"), ("dora", "fp8"), ("loha", "fp8"), ("oft", "int8")])
)
def test_run_goes_on_bitwise_and_predicts_on_quantized_bases(run, tiny, pairs, tmp_path, adapter, format):
    def arguments(name, steps, *more):
        made = quantized(tiny, pairs, tmp_path / name, steps, format, *LEARNS, *more)
        return [*made, *DORA] if adapter == "dora" else short_of(made, adapter)

    run("train", *arguments("whole", 3))
    run("train", *arguments("parts", 2))
    run("train", *arguments("parts", 3, "ckpt_path=last"))
    assert lora_bytes(tmp_path / "whole") == lora_bytes(tmp_path / "parts")
    assert lora_bytes(tmp_path / "whole") != lora_bytes(tmp_path / "parts", "step-000002")
    image = pairs / "control_images" / "00.png"
    asked = [f"image={image}", "prompt=x", "num_inference_steps=1", "lora_scale=[0,1]"]
    outcome = run("predict", f"lora={tmp_path / 'whole'}", *asked, f"output_dir={tmp_path / 'with'}")
    assert f"to {format}" in outcome.text  # of the file's header
    off, on = (pixels(path) for path in sorted((tmp_path / "with").glob("*.png")))
    assert (off != on).any()


KEYS = {
    "lokr": {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
    "lokr_full": {"lokr_w1", "lokr_w2"},
    "lokr_even": {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
    "loha": {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},
    "oft": {"oft_R.weight"},
}


@pytest.mark.parametrize("adapter", first(1, OTHERS))
def test_picture_of_the_file_is_the_stock_pipeline_s(run, stock, gallery, photo, tmp_path, adapter):
    """diffusers reads LoKr itself; `load_adapter` loads the others into its transformer."""
    folder, text = gallery(adapter).folder, gallery(adapter).text
    state = safetensors.torch.load_file(folder / FILE)
    ends = {re.sub(r".*\.(to_\w+|add_\w+|0|2|proj|proj_mlp)\.(?=[hlo])", "", key) for key in state}
    assert ends == KEYS[adapter]
    assert all(key.startswith("transformer.") for key in state)
    reads = "ComfyUI: reads it" if adapter != "oft" else "ComfyUI: does not read it"
    assert reads in text
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


def test_files_are_exported_with_what_is_lost(run, gallery, tmp_path):
    lokr, loha, oft = (gallery(kind).folder for kind in KINDS)

    def predict(task, name, *more, ok=True):
        return run("predict", f"task={task}", f"output_dir={tmp_path / name}", *more, ok=ok)

    assert "rank=8: the update changes by" in predict("export", "low", f"lora={loha}", "rank=8").text
    file = LoRAFile(tmp_path / "low" / "pytorch_lora_weights.safetensors")
    assert {update.kind for update in file.empty.values()} == {"LoRA"}
    assert file.adapter["rank"] == file.adapter["alpha"] == 8
    for words, *more in (
        ("format=kohya: a LoHa cannot be written in it. Choose format=diffusers", f"lora={loha}", "format=kohya"),
        ("fuse=true writes a transformer", f"lora={oft}", "rank=4"),
        ("is a LoKr, and only plain LoRAs can be added up", f"merge=[{lokr},{loha}]"),
    ):
        assert words in predict("export", "no", *more, ok=False).error


def test_an_oft_is_predicted_with_no_other(refuses, trained, gallery, photo):
    asked = [f"lora=[{gallery('oft').folder},{trained}]", f"image={photo}", "prompt=x"]
    refuses(*asked, words="is an OFT, which rotates the inputs of other LoRAs", script="predict")


@pytest.mark.parametrize("adapter", first(1, KINDS))
def test_training_starts_from_them(run, tiny, pairs, gallery, tmp_path, adapter):
    folder = gallery(adapter).folder
    arguments = short_of(short(tiny, pairs, tmp_path / "run", 1), adapter)
    still = ["optimizer.lr=0", "optimizer.weight_decay=0", "model.dtype=float32"]
    run("train", *arguments, *still, f"adapter.init_from={folder}")
    assert_close(folder, tmp_path / "run", rtol=1e-6, atol=1e-7)
    if adapter != "oft":
        arguments = short_of(short(tiny, pairs, tmp_path / "other", 1), adapter)
        other = run("train", *arguments, "adapter.rank=3", f"adapter.init_from={folder}", ok=False).error
        assert "by the settings a" in other


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "base"), [("loha", "nf4"), ("oft", "fp8"), ("dora", "fp8")])
def test_recomputed_and_compiled_blocks_give_the_same_bits(tiny, adapter, base, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    results = []
    for more in (["none"], ["full"], ["selective", "model.compile=true"]):
        settings = [*BASES[base], f"model.gradient_checkpointing={more[0]}", *more[1:]]
        module = build(tiny, adapter, *settings, dtype="bfloat16")
        del module.transformer.transformer_blocks[1:]
        del module.transformer.single_transformer_blocks[:-1]
        learn(module)
        results.append(step(module))
    torch._dynamo.reset()
    for other in results[1:]:
        different = [name for name in results[0] if not torch.equal(results[0][name], other[name])]
        assert not different


@pytest.mark.parametrize(
    ("model", "adapter"),
    first(1, [("z_image", "loha"), ("qwen_image_edit", "lokr"), ("longcat_image_edit", "oft")]),
)
def test_other_families_train_and_predict(run, arguments, photo, tmp_path, model, adapter):
    settings = short_of(arguments(model, tmp_path / "run", 2), adapter)
    run("train", *settings, *LEARNS)
    image = [] if model == "z_image" else [f"image={photo}"]
    asked = [f"lora={tmp_path / 'run'}", "prompt=x", "num_inference_steps=2", *image, "height=32", "width=48"]
    run("predict", *asked, "lora_scale=[0,1]", f"output_dir={tmp_path / 'out'}")
    off, on = (pixels(path) for path in sorted((tmp_path / "out").glob("*.png")))
    assert (off != on).any()


@pytest.mark.parametrize(("adapter", "frozen", "base"), [("lokr", "lora", "nf4"), ("lora", "lokr", "bf16")])
def test_a_training_adapter_of_any_kind_is_left_out_of_pictures_and_files(
    tiny, trained, gallery, tmp_path, adapter, frozen, base
):
    file = trained if frozen == "lora" else gallery(frozen).folder
    settings = [*BASES[base], "model.gradient_checkpointing=none", f"model.training_adapter={file}"]
    plain = build(tiny, adapter, *BASES[base], dtype="bfloat16")
    module = build(tiny, adapter, *settings, dtype="bfloat16")
    module.execution.check(sharded=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = velocity(plain, [0.5])  # an adapter that has not learned does nothing
        assert not torch.equal(velocity(module, [0.5]), expected)
        with module.execution.for_inference():
            assert torch.equal(velocity(module, [0.5]), expected)
        assert not torch.equal(velocity(module, [0.5]), expected)
    # Around one another, they are still known by the names of their layers.
    learn(module)
    updates, names = module.adapter.deltas(module.transformer), module.base.layer_names
    assert updates.keys() <= names.shapes.keys()
    module.adapter.write(tmp_path, module.adapter.gather(module.trained.parts), module.base, {}, torch.float32)
    assert module.adapter.check_written(tmp_path, module.base)
    module.adapter.lr_pattern = {"*.to_q": 0.5}
    factors = {name: module.adapter.lr_factor(name) for name in trainable(module.transformer)}
    assert {name for name, factor in factors.items() if factor == 0.5} == {name for name in factors if ".to_q." in name}
    assert set(factors.values()) == {0.5, 1.0}


def test_a_training_adapter_and_an_oft_refuse_each_other(tiny, trained, gallery):
    oft = gallery("oft").folder
    module = build(tiny, "oft", *BASES["nf4"], dtype="bfloat16")
    module.execution.training_adapter = TrainingAdapter(str(trained))
    with pytest.raises(UserError, match="OFT of blocks of 8 would change its output as well"):
        module.execution.check(sharded=False)
    module = build(tiny, "lora")
    module.execution.training_adapter = TrainingAdapter(str(oft))
    with pytest.raises(UserError, match="a LoRA, LoKr or LoHa is needed, not OFT"):
        module.execution.check(sharded=False)


@pytest.mark.slow
def test_two_processes_are_one_and_split_bases_train_the_same(run, in_two_processes, tiny, pairs, tmp_path):
    settings = ["optimizer.lr=1e-3", "scheduler=constant", "data.caption_dropout_rate=0", "model.dtype=float32"]
    settings.append(SMOOTH_ADAM)

    def overrides(kind, adapter, *more):
        chosen = DORA if adapter == "dora" else OTHERS[adapter]
        return [*short_of(short(tiny, pairs, tmp_path / kind / adapter, 2)), *chosen, *settings, *more]

    for adapter in (*KINDS, "dora"):
        run("train", *overrides("one", adapter, "data.batch_size=2"))
    ways = {"ddp": DDP, "fsdp": FSDP}
    status, text = in_two_processes(
        [overrides(way, kind, *more) for way, more in ways.items() for kind in (*KINDS, "dora")]
    )
    assert status == 0, text
    for way in ways:
        for adapter in (*KINDS, "dora"):
            assert_close(tmp_path / "one" / adapter, tmp_path / way / adapter)
