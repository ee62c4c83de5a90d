"""Qwen-Image-2.1: alpha, the layout of its sequence, its steps of sampling, and layers that see no samples."""

from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from PIL import Image

from datamodules.edits import EditsDataModule
from datamodules.images.windows import SeenByBoth, load_image
from datamodules.pairs import collate_pixels
from foundation.errors import UserError
from lightning_modules.families.qwen_image_2_1.denoise import joint_sequence
from lightning_modules.family import Sampling
from report.images import opaque, read_strip, to_image
from tests.support.objectives import losses
from tests.support.pictures import photograph
from tests.support.references import REFERENCES, condition_images, raw_sample
from tests.support.stock_pictures import stock_picture

REFERENCE = REFERENCES["qwen_image_2_1"]


@pytest.fixture
def module(repositories):
    return REFERENCE.build(repositories["qwen_image_2_1"])


def cut_out(name, width, height):
    """Return a photograph in a circle that fades to nothing."""
    image = photograph(name, width, height).convert("RGBA")
    rows, columns = np.indices((height, width))
    distance = np.hypot(rows / height - 0.5, columns / width - 0.5)
    image.putalpha(Image.fromarray((255 * (1.6 - 4 * distance).clip(0, 1)).astype("uint8")))
    return image


LAYOUTS = {
    "no image": ([0, 0, 0], [(2, 4)]),
    "one image": ([0, 1, 1, 0, 0], [(2, 4), (4, 2)]),
    "two side by side": ([0, 1, 1, 1, 0], [(4, 2), (2, 2), (6, 4)]),
    "three": ([1, 0, 0, 1, 1, 0, 1, 0], [(2, 2), (2, 4), (2, 2), (4, 6)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_sequence_is_the_stock_forwards(layout):
    slots, sizes = LAYOUTS[layout]
    own = joint_sequence(np.array(slots, dtype=bool), sizes, torch.device("cpu"))
    mask = torch.tensor([*slots, *[1] * (sizes[-1][0] * sizes[-1][1] // 4)], dtype=torch.bool)
    repeats = torch.where(mask, 4, 1)
    images = torch.repeat_interleave(mask, repeats)
    shapes = [(1, *size) for size in sizes]
    ids, target = QwenImage21Transformer2DModel.build_token_metadata(images, shapes)
    assert own.images.tolist() == ids.tolist()
    assert torch.equal(own.target.mask, target)
    assert int((~own.target).sum()) == int((~target).sum())
    assert torch.equal(own.places, images.nonzero()[:, 0])
    assert torch.equal(own.source, torch.repeat_interleave(torch.arange(len(mask)), repeats))
    rope = QwenImage21Rope(10000, [4, 6, 6])
    assert torch.equal(own.rotary_embedding(rope), rope(shapes, images, torch.device("cpu")))


EXECUTIONS = {
    "full": ["model.gradient_checkpointing=full"],
    "attention": ["model.gradient_checkpointing=attention", "model.offload.activations=true"],
    "streamed": ["model.gradient_checkpointing=full", "model.offload.blocks=2"],
    "compiled": ["model.gradient_checkpointing=none", "model.compile=true"],
    "compiled, attention": ["model.gradient_checkpointing=attention", "model.compile=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_execution_changes_neither_loss_nor_gradients(repositories, monkeypatch, tmp_path, execution):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    found = []
    for settings in (["model.gradient_checkpointing=none"], EXECUTIONS[execution]):
        module = REFERENCE.build(repositories["qwen_image_2_1"], *settings)
        found.append([])
        for index, sizes in enumerate(([(96, 48)], [(64, 64), (96, 48)])):  # a graph must serve other layouts
            raw = raw_sample(module, condition_images(sizes), tmp_path, index, REFERENCE.size)
            loss = losses(module, module.encoder(raw)).mean()
            loss.backward()
            found[-1].append(loss.detach())
        found[-1] += [one.grad for one in module.transformer.parameters() if one.grad is not None]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_layers_that_see_more_rows_than_samples_are_found(module):
    """T-LoRA must not adapt these, and may adapt all others."""
    rows = {}
    for name, layer in module.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in name:
            layer.register_forward_pre_hook(lambda _, args, name=name: rows.update({name: len(args[0])}))
    raws = [raw_sample(module, [], None, index, REFERENCE.size, REFERENCE.prompts) for index in range(2)]
    losses(module, module.encoder(collate_pixels(raws)))
    flattened = {name for name, count in rows.items() if count != 2}
    assert flattened == {name for name in rows if any(fnmatchcase(name, one) for one in module.layers.flattened)}
    assert flattened == {"modulation.1", "norm_out.linear"} | {
        f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)
    }


def test_images_that_the_text_encoder_would_resize_are_refused(module):
    with pytest.raises(UserError, match=r"condition images of 16x16 are outside .* change data.resolution or"):
        module.encode_prompt(module.base.components, "x", [torch.zeros(4, 16, 16, dtype=torch.uint8)])


def test_steps_are_the_distilled_models_own_only_for_as_many(module):
    index = {"sample_sigmas": [1.0, 0.9, 0.7]}
    found = [module.sampling_arguments(Sampling(steps, None, None, None), index) for steps in (3, 4)]
    assert found == [{"use_kv_cache": True, "sigmas": index["sample_sigmas"]}, {"use_kv_cache": True}]
    assert module.sampling_arguments(Sampling(3, None, None, None), {}) == {"use_kv_cache": True}


def test_alpha_reaches_both_encoders_as_in_the_pipeline(repositories, module, monkeypatch, tmp_path):
    """The autoencoder sees four channels; the text encoder sees the image on white."""
    stock = REFERENCE.stock(repositories["qwen_image_2_1"], monkeypatch)
    image = cut_out("astronaut", 90, 50)
    raw = raw_sample(module, [image], tmp_path)
    own = module.encode_prompt(module.base.components, "make it snow", raw.prompt_images[0])
    expected = REFERENCE.embeddings(stock, "make it snow", [image])
    torch.testing.assert_close(own["prompt_embeds"], expected["prompt_embeds"], rtol=0, atol=1e-5)
    [seen] = REFERENCE._seen(stock, [image])
    assert seen.mode == "RGBA"
    latent, _ = module.encode_pixels(module.base.components["vae"], raw.controls[0])
    torch.testing.assert_close(module.normalize(latent), REFERENCE.control(stock, seen).squeeze(2), rtol=0, atol=1e-5)
    opaque_raw = raw_sample(module, [image.convert("RGB")], tmp_path)
    assert (opaque_raw.controls[0][:, 3] == 1).all()
    assert (opaque_raw.controls[0] - raw.controls[0]).abs().max() > 1
    window = SeenByBoth(alpha=True).window(96, 48, flipped=True)
    image.resize((96, 48)).save(tmp_path / "cut.png")
    flipped = np.array(Image.open(tmp_path / "cut.png"))[:, ::-1]
    assert np.array_equal(np.array(to_image(load_image(tmp_path / "cut.png", window, alpha=True)[None])), flipped)


@pytest.mark.slow
def test_cut_outs_alpha_survives_training_and_prediction(run, arguments, repositories, tmp_path, monkeypatch):
    """Sample images show it on a checkerboard; predict.py writes what the stock pipeline makes."""
    for folder in ("training_images", "control_images"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for number, name in enumerate(("astronaut", "chelsea")):
        cut_out(name, 64, 64).save(tmp_path / "data" / "training_images" / f"{number}.png")
        cut_out(name, 96, 48).save(tmp_path / "data" / "control_images" / f"{number}.png")
        (tmp_path / "data" / "training_images" / f"{number}.txt").write_text("make it snow")
    more = [f"data.root={tmp_path / 'data'}", "data.val_count=1", "model.sampling.num_inference_steps=2"]
    more += ["callbacks.sample_images.count=1", "optimizer.lr=3e-2", "data.alpha_mask=true"]
    text = run("train", *arguments("qwen_image_2_1", tmp_path / "run", 2, *more, shown=True)).text
    assert "2 pairs have an alpha channel, which this model learns" in text
    [sheet] = (tmp_path / "run/samples/step-000002").glob("*.png")
    strip = read_strip(sheet)
    assert strip.target.getpixel((0, 0)) in ((204, 204, 204), (255, 255, 255)), "transparent there"
    target = opaque(Image.open(tmp_path / "data/training_images" / f"{sheet.stem}.png"))
    assert np.array_equal(np.asarray(strip.target), np.asarray(target))
    photo, lora = tmp_path / "data" / "control_images" / "0.png", tmp_path / "run" / "lora" / "last"
    monkeypatch.chdir(tmp_path)
    request = [f"image={photo}", "prompt=make it snow", "seed=11", "num_inference_steps=2", "width=64", "height=64"]
    run("predict", f"lora={tmp_path / 'run'}", "output_dir=out", *request)
    (picture,) = (tmp_path / "out").glob("*.png")
    call = {"output_resolution": 64, "width": 64, "height": 64, "num_inference_steps": 2, "prompt": "make it snow"}
    expected = stock_picture(repositories["qwen_image_2_1"], lora, monkeypatch, image=Image.open(photo), **call)
    own = np.asarray(Image.open(picture)).astype(int)
    assert own.shape == (64, 64, 4)
    assert np.abs(own - (255 * expected).round()).max() <= 1
    assert own[..., 3].std() > 5


def test_prompts_without_images_are_sampled_at_a_given_size(module):
    edits = EditsDataModule(None, "a red cat", None, None, [0], [1.0], 96, 64, 4096, 1)
    edits.configure_for(module)
    request = edits.request(edits.edits[0])
    assert (request.size, request.raw.controls) == ((64, 96), [])
    [(pixels, _)] = module.sampler.generate(request, lambda: False)
    assert pixels.shape == (1, 4, 96, 64)
    edits.height = 80
    with pytest.raises(UserError, match=r"height=80: .* makes images whose sides are multiples of 32"):
        edits.configure_for(module)
