"""lora_scale by patterns of layers' names, against the stock pipeline with layers that are scaled by hand."""

import re

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft.tuners.lora import LoraLayer

from foundation.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.gates import attach_rank_schedule
from lightning_modules.lora_files.reading import LoRAFile
from tasks.edit import lora_weights
from tests.support.commands import compose
from tests.support.pictures import pixels, records
from tests.support.tiny_adapters import LAYER, build, export, learn
from tests.test_predict import stock_picture

SCALES = "lora_scale={transformer_blocks.*:0.5,*.1.attn.to_?:-1,single_transformer_blocks.1.*:1.7}"
STEPS = 3


def by_hand(layer: str) -> float:
    """Return the scale of a layer by `SCALES`, without patterns."""
    first, number, *rest = layer.split(".")
    if first == "single_transformer_blocks" and number == "1":
        return 1.7
    if number == "1" and rest in (["attn", "to_q"], ["attn", "to_k"], ["attn", "to_v"]):
        return -1.0
    return 0.5 if first == "transformer_blocks" else 1.0


def scale_by_hand(stock):
    """Scale all loaded adapters."""
    scaled = set()
    for name, layer in stock.transformer.named_modules():
        if isinstance(layer, LoraLayer):
            scaled.add(by_hand(name))
            for adapter in layer.scaling:
                layer.scaling[adapter] *= by_hand(name)
    assert scaled == {0.5, 1.0, -1.0, 1.7}


@pytest.mark.parametrize("adapters", [["tlora", "lora"], ["dora"]])
def test_layers_are_scaled_as_by_hand_in_the_stock_pipeline(run, stock, gallery, photo, tmp_path, adapters):
    folders = [gallery(adapter).folder / "lora" / "last" for adapter in adapters]
    lora, weights = f"lora=[{','.join(map(str, folders))}]", [1.0, 0.6][: len(adapters)]
    request = [f"image={photo}", "prompt=make it snow", f"num_inference_steps={STEPS}", f"output_dir={tmp_path}"]
    run("predict", *request, lora, SCALES, f"lora_weights={weights}")
    [record] = records(tmp_path)
    for adapter, folder in zip(adapters, folders, strict=True):
        stock.load_lora_weights(folder, adapter_name=adapter)
        if adapter == "tlora":
            attach_rank_schedule(stock, folder, adapter)
    stock.set_adapters(adapters, weights)
    unscaled = stock_picture(stock, photo, "make it snow", num_inference_steps=STEPS)
    scale_by_hand(stock)
    expected = stock_picture(stock, photo, "make it snow", num_inference_steps=STEPS)
    assert np.abs(pixels(tmp_path / record["file"]) - expected).max() <= 1
    assert np.abs(expected - unscaled).max() > 5
    patterns = {"transformer_blocks.*": 0.5, "*.1.attn.to_?": -1.0, "single_transformer_blocks.1.*": 1.7}
    assert (record["lora_scale"], record["lora_weights"]) == (patterns, weights)
    assert record["file"] == f"photo_p00_img00_steps{STEPS}_g2.5_lora-by-layer.png"


def test_a_pattern_that_matches_no_layer_is_one_line(refuses, trained, photo):
    request = [f"lora={trained}", f"image={photo}", "prompt=x", "lora_scale={transformer_block.*:0.5}"]
    refuses(*request, words="matches no layer of the adapter. It has transformer_blocks.*, ", script="predict")


KINDS = {"lora": 1.0, "lokr": 0.3, "tlora": -0.5, "dora": 0.0}


def test_weights_of_several_loras_multiply_their_updates(tiny, tmp_path):
    """Every kind is tested with scales by layer and a common scale; a weight of 0 disables even a DoRA."""
    files = [tmp_path / kind / "pytorch_lora_weights.safetensors" for kind in KINDS]
    for kind, file in zip(KINDS, files, strict=True):
        module = build(tiny, kind)
        learn(module)
        export(module, file)
    module = build(tiny, "lora")
    transformer, base = FluxTransformer2DModel.from_pretrained(tiny / "transformer"), module.base
    plain = transformer.get_submodule(LAYER).weight.detach().clone()
    weights = list(KINDS.values())
    loras = AppliedLoRAs(files, {"transformer_blocks.0.*": 0.7}, weights)
    loras.load(transformer, base)
    for gate in loras.rank_gates:
        gate.open(torch.zeros(1), None, torch.float32)  # all ranks
    names = base.layer_names
    deltas = [LoRAFile(file).read(names, base.name)[LAYER].matrix().float() for file in files]
    for scale in (2.0, 1.0):
        loras.set_scale(transformer, scale)
        update = sum(0.7 * scale * weight * delta for weight, delta in zip(weights, deltas, strict=True))
        x = torch.randn(1, 5, plain.shape[1])
        expected = x @ (plain + update).T + transformer.get_submodule(LAYER).bias
        torch.testing.assert_close(transformer.get_submodule(LAYER)(x), expected, rtol=1e-4, atol=1e-4)
    assert all(delta.norm() > 1 for delta in deltas)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lora_scale=[1,0.3]"], "lora_scale=[1, 0.3] for 2 LoRAs is ambiguous. For a strength of each LoRA write"),
        (["lora_weights=[1]"], "lora_weights=[1]: 1 for 2 LoRAs. Give one for each."),
    ],
)
def test_strengths_that_do_not_fit_the_loras_are_one_line(settings, words):
    with pytest.raises(UserError, match=re.escape(words)):
        lora_weights(compose("predict", "lora=[a,b]", *settings), 2, [1.0, 0.3])


def test_scales_of_a_strip_and_weights_combine():
    cfg = compose("predict", "lora=[a,b]", "lora_scale=[1,0.3]", "lora_weights=[1,1]")
    assert lora_weights(cfg, 2, [1.0, 0.3]) == [1.0, 1.0]
    assert lora_weights(compose("predict", "lora=[a,b]", "lora_scale=[0,0.5,1]"), 2, [0.0, 0.5, 1.0]) is None
    assert lora_weights(compose("predict", "lora=a", "lora_scale=[0.5]"), 1, [0.5]) is None
