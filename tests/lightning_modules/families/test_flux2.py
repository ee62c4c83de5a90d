"""FLUX.2: references, guidance and shift, as its pipelines have them."""

import shutil

import pytest
import torch

from datamodules.images.decoding import to_tensor
from datamodules.images.windows import ConditionImages, Window
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.family import Sampling
from tests.support.pictures import photograph
from tests.support.references import PROMPTS, REFERENCES, condition_images, raw_sample
from tests.support.tiny_pipelines import edit_json

KLEIN = REFERENCES["flux2_klein_4b"]


class Seen(Exception):
    """The images that the stock pipeline would encode."""


def preprocessed(stock, image):
    """Preprocess a reference as the stock pipeline does for its autoencoder."""

    def stop(images, **_):
        raise Seen(images)

    stock.prepare_image_latents = stop
    with pytest.raises(Seen) as seen:
        stock(image=image, prompt="x", width=16, height=16, max_sequence_length=8, num_inference_steps=1)
    return seen.value.args[0][0]


@pytest.mark.parametrize("size", [(96, 75), (65, 127), (1024, 1024), (2000, 777)])
def test_references_are_cropped_and_shrunk_as_in_the_pipeline(size, repositories, monkeypatch):
    image = photograph("chelsea", *size)
    window = KLEIN.build(repositories[KLEIN.name]).condition_images.window(*size)
    expected = preprocessed(KLEIN.stock(repositories[KLEIN.name], monkeypatch), image)[0]
    own = to_tensor(window.of(image))
    assert own.shape == expected.shape
    if size[0] * size[1] <= 1024**2:
        assert torch.equal(own, expected)
    # What is shrunk is resized in one go with the crop: a few pixels round otherwise, by two steps of 8 bits at most.
    torch.testing.assert_close(own, expected, rtol=0, atol=4 / 255 + 1e-6)
    assert (own != expected).float().mean() < 5e-4


def test_windows_of_larger_references_are_narrowed_in_their_proportions():
    images = ConditionImages(most_area=64 * 64, crops=True)
    window = Window((200, 160), (10, 20, 170, 116), (160, 96))
    narrowed = images.narrowed(window)
    assert narrowed.size == images.size(160, 96) == (80, 48)
    across, down = (seen / side for seen, side in zip(narrowed.seen, narrowed.size, strict=True))
    assert across == pytest.approx(down, rel=0.02)
    center = (narrowed.box[0] + narrowed.box[2], narrowed.box[1] + narrowed.box[3])
    assert center == (180, 136)
    small = Window((64, 48), (0, 0, 64, 48), (64, 48))
    assert images.narrowed(small) == small


@pytest.mark.slow
def test_distilled_model_is_not_guided(repositories, monkeypatch, tmp_path):
    """Whatever the scale: `is_distilled` of its repository decides."""
    base = repositories[KLEIN.name]
    distilled = shutil.copytree(base, tmp_path / "distilled")
    edit_json(distilled / "model_index.json", is_distilled=True)
    images = condition_images([(96, 75)])
    call = {"num_inference_steps": 4, "width": 64, "height": 48, "output_type": "pt", **KLEIN.call}
    found = []
    for repository, guidance in ((distilled, 4.0), (base, 1.0), (base, 4.0)):
        module, stock = KLEIN.build(repository), KLEIN.stock(repository, monkeypatch)
        for layer in lora_layers(module.transformer).values():
            layer.enable_adapters(False)
        generator = torch.Generator().manual_seed(7)
        expected = stock(**call, prompt=PROMPTS[0], image=images, guidance_scale=guidance, generator=generator).images
        sampling = Sampling(4, guidance, None, None)
        encoded = module.encoder(raw_sample(module, images, tmp_path), module.sampling_rules.negative_prompt(sampling))
        found.append(module.sampler.sample(encoded, sampling, (64, 48), [7]) / 2 + 0.5)
        torch.testing.assert_close(found[-1].clamp(0, 1), expected, rtol=0, atol=1e-5)
    alike, unguided, guided = found
    assert torch.equal(alike, unguided)
    assert (alike - guided).abs().max() > 1e-3
