"""predict.py by its real command line, against the stock pipeline."""

import shutil

import numpy as np
import torch
from PIL import Image

from lightning_modules.pretrained.frozen_base import FrozenBase
from tests.support.pictures import photograph, pixels, records


def stock_picture(stock, photo, prompt="mirror picture 1", seed=42, **arguments):
    defaults = {"width": 48, "height": 32, "num_inference_steps": 4, "guidance_scale": 2.5}
    arguments = {**defaults, **arguments}
    image = stock(
        image=Image.open(photo),
        prompt=prompt,
        max_area=arguments["width"] * arguments["height"],
        max_sequence_length=16,
        _auto_resize=False,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    ).images[0]
    return np.asarray(image).astype(int)


def test_trained_lora_creates_predicts_image_in_the_stock_pipeline(run, stock, trained, photo, tmp_path, monkeypatch):
    """Images are compared with a true CFG scale; tests/test_families.py compares every model without one.

    Text encoders have left before the transformer is loaded.
    """
    present, load = [], FrozenBase.load_transformer
    monkeypatch.setattr(
        FrozenBase, "load_transformer", lambda base: present.append(set(base.components.models())) or load(base)
    )
    guided = {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    request = ["prompt=mirror picture 1", "num_inference_steps=4", *(f"{key}={value}" for key, value in guided.items())]
    run("predict", f"lora={trained}", f"image={photo}", f"output_dir={tmp_path / 'out'}", *request)
    [left] = present
    assert left.isdisjoint(("text_encoder", "text_encoder_2"))
    unadapted = stock_picture(stock, photo, **guided)
    stock.load_lora_weights(trained / "lora" / "last")
    expected, own = stock_picture(stock, photo, **guided), pixels(tmp_path / "out" / "photo.png")
    assert np.abs(own - expected).max() <= 1, "equal before rounding to 8 bits"
    assert (own != expected).mean() < 0.01
    assert np.abs(expected - unadapted).max() > 10
    (record,) = records(tmp_path / "out")
    assert record["seconds"].keys() == {"load", "encode_prompt", "encode_image", "denoise", "decode"}
    assert record["prompt"] == "mirror picture 1"
    assert (record["width"], record["height"], record["seed"]) == (48, 32, 42)


def test_scales_seeds_and_prompts_multiply_and_batches_of_results_are_those_made_alone(
    run, stock, trained, photo, tmp_path
):
    """Results of a batch are equal up to 8-bit rounding."""
    (tmp_path / "prompts.txt").write_text("mirror picture 1\n\nmake it snow\n")
    out, together = tmp_path / "out", tmp_path / "together"
    request = [f"lora={trained}", f"image={photo}", f"prompts_file={tmp_path / 'prompts.txt'}", "seed=[1,9]"]
    request += ["num_images_per_prompt=2", "lora_scale=[0,1]", "num_inference_steps=1"]
    run("predict", *request, f"output_dir={out}")
    names = [f"photo_p{prompt:02d}_img{i:02d}_steps1_g2.5" for prompt in (0, 1) for i in range(4)]
    assert {path.name for path in out.glob("*.png")} == {f"{n}_lora{scale}.png" for n in names for scale in (0.0, 1.0)}
    unadapted = stock_picture(stock, photo, "make it snow", seed=10, num_inference_steps=1)
    assert np.abs(pixels(out / "photo_p01_img03_steps1_g2.5_lora0.0.png") - unadapted).max() <= 1
    assert np.abs(pixels(out / "photo_p01_img03_steps1_g2.5_lora1.0.png") - unadapted).max() > 5
    run("predict", *request, "batch_size=4", f"output_dir={together}")
    made = [{row["file"]: (row["prompt"], row["seed"]) for row in records(folder)} for folder in (out, together)]
    assert made[0] == made[1]
    assert len(made[0]) == 16
    assert all(np.abs(pixels(out / name) - pixels(together / name)).max() <= 1 for name in made[0])


def test_size_and_prompt_are_a_complete_request(run, stock, trained, tmp_path):
    common = [f"lora={trained}", "prompt=x", "num_inference_steps=2", "width=48", "height=64"]
    run("predict", *common, f"output_dir={tmp_path / 'a'}")
    stock.load_lora_weights(trained / "lora" / "last")
    expected = stock(
        prompt="x", width=48, height=64, max_area=48 * 64, num_inference_steps=2, guidance_scale=2.5,
        max_sequence_length=16, generator=torch.Generator().manual_seed(42),
    ).images[0]  # fmt: skip
    assert np.abs(pixels(tmp_path / "a" / "image.png") - np.asarray(expected).astype(int)).max() <= 1


def test_model_settings_come_from_the_weights_and_the_command_line_goes_first(run, trained, tiny, tmp_path):
    photograph("coffee", 192, 128).save(photo := tmp_path / "photo.png")
    file = trained / "lora" / "last" / "pytorch_lora_weights.safetensors"
    moved = shutil.copy(file, tmp_path / "elsewhere.safetensors")  # without config.yaml
    common = [f"image={photo}", "prompt=x", "num_inference_steps=1"]
    here = run("predict", f"lora={trained}", *common, f"output_dir={tmp_path / 'a'}")
    assert "note:" not in here.text
    error = run("predict", f"lora={moved}", *common, f"output_dir={tmp_path / 'b'}", ok=False).error
    assert f"was trained on {tiny.name} of the machine that trained it" in error
    other = ["model.dtype=bfloat16", f"model.pretrained_model_name_or_path={tiny}"]
    outcome = run("predict", f"lora={moved}", *common, *other, f"output_dir={tmp_path / 'b'}")
    assert "was trained on base_precision float32, this is bfloat16" in outcome.text
    assert not np.array_equal(pixels(tmp_path / "a" / "photo.png"), pixels(tmp_path / "b" / "photo.png"))
