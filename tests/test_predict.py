"""predict.py by its real command line, against the stock pipeline."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.commands import short
from tests.support.pictures import pixels, records


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


def test_trained_lora_gives_predicts_picture_in_the_stock_pipeline(run, stock, trained, photo, tmp_path):
    """With a true CFG scale; tests/test_families.py compares every model without one."""
    guided = {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    request = ["prompt=mirror picture 1", "num_inference_steps=4", *(f"{key}={value}" for key, value in guided.items())]
    run("predict", f"lora={trained}", f"image={photo}", f"output_dir={tmp_path / 'out'}", *request)
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


def test_scales_seeds_and_prompts_multiply(run, stock, trained, photo, tmp_path):
    (tmp_path / "prompts.txt").write_text("mirror picture 1\n\nmake it snow\n")
    out = tmp_path / "out"
    run(
        "predict", f"lora={trained}", f"image={photo}", f"prompts_file={tmp_path / 'prompts.txt'}", "seed=[1,9]",
        "num_images_per_prompt=2", "lora_scale=[0,1]", "num_inference_steps=1", f"output_dir={out}",
    )  # fmt: skip
    names = [f"photo_p{prompt:02d}_img{i:02d}_steps1_g2.5" for prompt in (0, 1) for i in range(4)]
    assert {path.name for path in out.glob("*.png")} == {f"{n}_lora{scale}.png" for n in names for scale in (0.0, 1.0)}
    assert len(records(out)) == 16
    unadapted = stock_picture(stock, photo, "make it snow", seed=10, num_inference_steps=1)
    assert np.abs(pixels(out / "photo_p01_img03_steps1_g2.5_lora0.0.png") - unadapted).max() <= 1
    assert np.abs(pixels(out / "photo_p01_img03_steps1_g2.5_lora1.0.png") - unadapted).max() > 5


def test_size_and_prompt_alone(run, stock, trained, tmp_path):
    common = [f"lora={trained}", "prompt=x", "num_inference_steps=2", "width=48", "height=64"]
    run("predict", *common, f"output_dir={tmp_path / 'a'}")
    stock.load_lora_weights(trained / "lora" / "last")
    expected = stock(
        prompt="x", width=48, height=64, max_area=48 * 64, num_inference_steps=2, guidance_scale=2.5,
        max_sequence_length=16, generator=torch.Generator().manual_seed(42),
    ).images[0]  # fmt: skip
    assert np.abs(pixels(tmp_path / "a" / "picture.png") - np.asarray(expected).astype(int)).max() <= 1


def test_model_settings_come_from_the_weights_and_the_command_line_goes_first(run, trained, tiny, photo, tmp_path):
    file = trained / "lora" / "last" / "pytorch_lora_weights.safetensors"
    moved = shutil.copy(file, tmp_path / "elsewhere.safetensors")  # without config.yaml
    common = [f"image={photo}", "prompt=x", "num_inference_steps=1"]
    here = run("predict", f"lora={trained}", *common, f"output_dir={tmp_path / 'a'}")
    assert "note:" not in here.text
    other = ["model.dtype=bfloat16", f"model.pretrained_model_name_or_path={tiny}"]
    outcome = run("predict", f"lora={moved}", *common, *other, f"output_dir={tmp_path / 'b'}")
    assert "was trained on base_precision float32, this is bfloat16" in outcome.text
    assert not np.array_equal(pixels(tmp_path / "a" / "photo.png"), pixels(tmp_path / "b" / "photo.png"))


@pytest.mark.slow
def test_bf16_sample_of_training_is_predicts_too(run, tiny, pairs, tmp_path):
    """Loaders cast the LoRA to the base's dtype; samples in training must not look better than that."""
    arguments = short(tiny, pairs, tmp_path / "run", 2, shown=True)
    steps = "num_inference_steps=2"
    run("train", *arguments, "model.dtype=bfloat16", "optimizer.lr=3e-2", f"model.sampling.{steps}")
    out = tmp_path / "out"
    image = pairs / "control_images" / "02.png"
    run("predict", f"lora={tmp_path / 'run'}", f"image={image}", "prompt=mirror picture 2", steps, f"output_dir={out}")
    strip = pixels(tmp_path / "run" / "samples" / "step-000002" / "02.png")
    assert np.array_equal(strip[:, :32], pixels(image))
    assert np.array_equal(strip[:, 32:64], pixels(out / "02.png"))
    assert np.array_equal(strip[:, 64:], pixels(pairs / "training_images" / "02.png"))


def test_pictures_made_at_once_are_those_made_alone(run, trained, photo, tmp_path, monkeypatch):
    """Two prompts and three seeds in batches of four give the same files, up to 8-bit rounding."""
    monkeypatch.chdir(tmp_path)
    request = [f"lora={trained}", f"image={photo}", "num_inference_steps=2", "prompt=[mirror picture 1,make it snow]"]
    for name, more in (("alone", []), ("together", ["batch_size=4"])):
        run("predict", *request, "seed=[1,2,3]", f"output_dir={name}", *more)
    made = [{row["file"]: (row["prompt"], row["seed"]) for row in records(tmp_path / n)} for n in ("alone", "together")]
    assert made[0] == made[1]
    assert len(made[0]) == 6
    for name in made[0]:
        assert np.abs(pixels(tmp_path / "alone" / name) - pixels(tmp_path / "together" / name)).max() <= 1
