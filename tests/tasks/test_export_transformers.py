"""task=export with whole transformers: a LoRA in the weights, and a LoRA of what was fine-tuned."""

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate

from tests.support.combinations import first
from tests.support.commands import compose, run_task
from tests.support.pictures import pixels

WEIGHTS = "pytorch_lora_weights.safetensors"


def request(photo, *more):
    return [f"image={photo}", "prompt=mirror picture 1", "num_inference_steps=3", *more]


def kontext(tiny, *more):
    return [
        "model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", "model.dtype=float32",
        "model.max_sequence_length=16", *more,
    ]  # fmt: skip


@pytest.mark.parametrize(("format", "written"), first(1, [(("format=comfyui",), "run_comfyui.safetensors"), ((), "")]))
def test_a_fused_transformer_creates_the_images_of_the_lora(run, tiny, trained, photo, tmp_path, format, written):
    text = run_task("export", f"lora={trained}", "fuse=true", *format, f"output_dir={tmp_path / 'fused'}")
    assert not (tmp_path / "fused" / WEIGHTS).exists()
    assert ("models/diffusion_models" in text) == bool(format)
    run("predict", f"lora={trained}", *request(photo, "lora_scale=[0,1]", f"output_dir={tmp_path / 'lora'}"))
    fused = f"model.transformer_name_or_path={tmp_path / 'fused' / written}"
    run("predict", *kontext(tiny, fused), *request(photo, f"output_dir={tmp_path / 'out'}"))
    alone, with_lora = (pixels(path) for path in sorted((tmp_path / "lora").glob("*.png")))
    with_fused = pixels(next((tmp_path / "out").glob("*.png")))
    assert np.abs(with_lora - with_fused).max() <= 1
    assert np.abs(with_lora - alone).max() > 10


def test_a_merge_is_fused(gallery, tiny, tmp_path):
    lora = gallery("lora").folder
    merge = [f"merge=[{lora},{lora}]", "merge_weights=[0.5,0.25]", "fuse=true"]
    run_task("export", *merge, f"output_dir={tmp_path / 'sum'}")
    layer = "transformer_blocks.0.attn.to_q"
    state = safetensors.torch.load_file(lora / "lora" / "last" / WEIGHTS)
    update = state[f"transformer.{layer}.lora_B.weight"] @ state[f"transformer.{layer}.lora_A.weight"]
    [base] = (tiny / "transformer").glob("*.safetensors")
    [fused] = (tmp_path / "sum").glob("*.safetensors")
    before, after = (safetensors.torch.load_file(file)[f"{layer}.weight"] for file in (base, fused))
    torch.testing.assert_close(after - before, 0.75 * update, rtol=1e-4, atol=1e-6)


def test_full_fine_tuning_is_extracted_to_a_lora(runs, tiny, tmp_path):
    """The LoRA of full rank equals the difference of the weights; biases and norms are named."""
    tuned = runs(1, "adapter=full", "optimizer.lr=1e-3", "scheduler=constant").folder / "model" / "last"
    text = run_task("export", f"extract={tuned}", "rank=64", *kontext(tiny), f"output_dir={tmp_path / 'lora'}")
    assert "rank 64 lacks " in text
    assert "note: a LoRA cannot hold what else differs, biases and norms: " in text
    lora = tmp_path / "lora" / WEIGHTS
    base, fine = (
        instantiate(compose("predict", *kontext(folder)).model).base.load_transformer() for folder in (tiny, tuned)
    )
    state = safetensors.torch.load_file(lora)
    for name, weight in fine.named_parameters():
        layer = f"transformer.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in state:
            update = state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]
            torch.testing.assert_close(update, weight - base.get_parameter(name), rtol=1e-3, atol=1e-5)


MISTAKES = {
    ("extract={tuned}",): "needs rank=N",
    ("extract={tuned}", "rank=4"): "does not differ from",
    ("extract={tuned}", "rank=4", "lora={lora}"): "Give one of them, not lora and extract",
    ("extract=nowhere/at-all", "rank=4"): "nowhere/at-all",
    ("lora={lora}", "fuse=true", "format=kohya"): "format has no effect with fuse=true",
    ("lora={lora}", "fuse=true", "format=comfyui", "model/quantization=fp8"): "model/quantization has no effect with",
    ("lora={lora}", "fuse=true", "format=comfyui", "output_dir={older}"): "_comfyui.safetensors exists: choose another",
    ("lora={lora}", "fuse=true", "output_dir={full}"): "is not empty",
}


@pytest.mark.parametrize("settings", MISTAKES)
def test_mistakes_are_one_line(refuses, tiny, trained, tmp_path, settings):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / f"{trained.name}_comfyui.safetensors").touch()
    places = {"tuned": tiny, "lora": trained, "full": tmp_path / "full", "older": tmp_path / "older"}
    base = kontext(tiny) if "extract" in settings[0] else []
    refuses(
        "task=export", *base, *(one.format(**places) for one in settings), words=MISTAKES[settings], script="predict"
    )
