"""LongCat: sizes and prompts, as its pipeline has them."""

import pytest
import torch
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from hydra.utils import instantiate

from datamodules.images.windows import Window
from datamodules.pairs import collate_pixels
from foundation.errors import UserError
from lightning_modules.families.longcat_image.module import HalvedForText
from tests.support.commands import compose
from tests.support.pictures import photograph
from tests.support.references import PROMPTS, REFERENCES, VAE
from tests.support.references import raw_sample as read_sample

REFERENCE = REFERENCES["longcat_image_edit"]
LENGTH = 512


@pytest.fixture
def module(repositories):
    return REFERENCE.build(repositories[REFERENCE.name])


@pytest.fixture
def stock(repositories, monkeypatch):
    return REFERENCE.stock(repositories[REFERENCE.name], monkeypatch)


def raw_sample(module, image, folder):
    return read_sample(module, [image], folder)


@pytest.mark.parametrize("area", [1024 * 1024, VAE])
def test_every_size_is_the_pipelines(area):
    images = HalvedForText(vae_image_size=area)
    sizes = torch.randint(16, 4000, (3000, 2), generator=torch.Generator().manual_seed(1)).tolist()
    for width, height in [(1024, 1024), (16, 16), (5, 7), (333, 1999), *sizes]:
        expected = pipeline_longcat_image_edit.calculate_dimensions(area, width * 1.0 / height)
        assert images.size(width, height) == expected


def test_text_encoder_sees_the_same_part_of_an_image_as_the_autoencoder(module, tmp_path):
    photograph("chelsea", 200, 100).save(tmp_path / "x.png")
    crop = Window((160, 80), (20, 0, 148, 64), (128, 64), flipped=True)
    [[pixels]], [seen] = module.condition_images.load([tmp_path / "x.png"], [crop])
    [[whole]], _ = module.condition_images.load([tmp_path / "x.png"], [Window.whole((128, 64))])
    assert seen.shape == (3, 32, 64)
    halved = torch.nn.functional.interpolate(pixels[None], (32, 64), mode="area")[0]
    assert ((halved + 1) * 127.5 - seen).abs().mean() < 4
    assert (whole - pixels).abs().mean() > 0.1


def test_embeddings_of_odd_prompts_are_the_pipelines(module, stock, tmp_path):
    """This includes prompts that are too long, for which the pipeline fails."""
    image = photograph("astronaut", 96, 48)
    [seen] = raw_sample(module, image, tmp_path).prompt_images
    for prompt in (" ", "'", '""', "it's 'a\"b' \"", "x" * LENGTH):
        own = module.encode_prompt(module.base.components, prompt, seen)
        torch.testing.assert_close(own, REFERENCE.embeddings(stock, prompt, [image]), rtol=0, atol=1e-5)
    long = "ab" * 300
    with pytest.raises(TypeError):
        REFERENCE.embeddings(stock, long, [image])
    own = module.encode_prompt(module.base.components, long, seen)["prompt_embeds"]
    expected = REFERENCE.embeddings(stock, long[:LENGTH], [image])["prompt_embeds"]
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_quoted_words_are_counted_letter_by_letter(module):
    assert module.prompt_tokens(module.base.components, ["write 'no' on the cat's ear"]) == ([27], LENGTH)


def test_shapes_of_prompts_are_known_without_weights(module, tmp_path):
    image = photograph("astronaut", 1200, 800)
    big = HalvedForText(1, 1, vae_image_size=512 * 512)
    [own] = module.prompt_shapes({"joint_attention_dim": 32}, PROMPTS[0], [big.size(*image.size)]).values()
    image.save(tmp_path / "x.png")
    seen = big.load([tmp_path / "x.png"], [big.window(*image.size)])[1]
    assert module.encode_prompt(module.base.components, PROMPTS[0], seen)["prompt_embeds"].shape == own


def test_images_of_several_sizes_are_no_batch(module, tmp_path):
    """Their texts have different lengths and no mask."""
    samples = [raw_sample(module, photograph("cat", *size), tmp_path) for size in ((64, 64), (200, 20))]
    samples[1].controls = samples[0].controls  # which could not even be collated
    with pytest.raises(UserError, match=r"a batch has prompt_embeds of \[5\d\d, 5\d\d\] tokens.* data.batch_size=1"):
        module.encoder(collate_pixels(samples))


def test_image_keeps_no_size_of_its_own():
    with pytest.raises(Exception, match=r"model\.vae_image_size=null: LongCat resizes each condition image"):
        instantiate(compose("train", "model=longcat_image_edit", "model.vae_image_size=null").model)
