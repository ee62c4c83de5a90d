"""FLUX.3: a modular repository, single references, windows of text and unused blocks, as its pipeline has them."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import Flux3AutoBlocks
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from hydra.utils import instantiate

from datamodules.images.decoding import to_tensor
from datamodules.images.resizing import Framing
from datamodules.images.samples import Root, Sample
from datamodules.images.windows import load_image, load_mask
from datamodules.pairs import collate_pixels
from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.families.flux3.module import Flux3Klein
from lightning_modules.inference import SamplingTransformer
from lightning_modules.pretrained.component_files import load_component
from report.commands import Names, commands
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.flux3_reference import FLUX3_REFERENCE
from tests.support.objectives import losses
from tests.support.pictures import photograph, pixels, records
from tests.support.references import condition_images, raw_sample
from tests.support.stock_pictures import load_stock
from tests.support.tiny_pipelines import edit_json

REFERENCE, IMAGES = FLUX3_REFERENCE, Flux3Klein.condition_images


@pytest.fixture
def repository(repositories):
    return repositories["flux3_klein"]


@pytest.fixture
def module(repository):
    return REFERENCE.build(repository)


ALONE = [(96, 75), (64, 64), (37, 200), (15, 90), (9000, 30), (4100, 1900), (2048, 2049), (5000, 3001)]


@pytest.mark.parametrize(("width", "height"), first(5, ALONE))
def test_single_reference_is_padded_and_shrunk_as_in_the_pipeline(width, height):
    image = photograph("chelsea", width, height)
    expected, more = Flux3ImageProcessor().preprocess(image)
    window = IMAGES.window(width, height)
    assert window.inside == more["reference_crop"]
    assert torch.equal(to_tensor(window.of(image)), expected[0])


@pytest.mark.parametrize("size", [(96, 75), (64, 64), (2000, 777)])
def test_several_references_are_cropped_and_shrunk_as_in_the_pipeline(size):
    image = photograph("chelsea", *size)
    expected = Flux3ImageProcessor().preprocess(image, resize_mode="crop")[0][0]
    own = to_tensor(IMAGES.of_count(2).window(*size).of(image))
    assert own.shape == expected.shape
    # What is shrunk is resized in one go with the crop: a few pixels round otherwise.
    torch.testing.assert_close(own, expected, rtol=0, atol=4 / 255 + 1e-6)


def test_target_and_mask_of_a_single_reference_are_padded_like_it(tmp_path):
    sizes = (101, 75), (101, 75)
    framing = Framing("exact", False, "center", 1, True, 16, IMAGES)
    sample = Sample("a", tmp_path / "x.png", (tmp_path / "x.png",), ("",), tmp_path / "x.png")
    photograph("coffee", *sizes[0]).save(tmp_path / "x.png")
    upright, flipped = framing.views(sample, Root("", resolution=(256,)), sizes)
    for view in (upright, flipped):
        target, control = view.windows
        assert target == control
        assert target.size == (112, 80)
        seen = load_image(tmp_path / "x.png", target)
        assert load_mask(tmp_path / "x.png", target).shape == (1, 80, 112)
    assert torch.equal(load_image(tmp_path / "x.png", upright.windows[0]).flip(2), seen)
    several, *_ = framing.views(sample, Root("", resolution=(256,)), (*sizes, (60, 60)))
    assert several.windows[0].size == (96, 64)


def test_edit_of_one_image_of_any_size_is_the_pipelines(run, repository, tmp_path):
    """The result has the size of the image: the canvas is cropped back."""
    photograph("astronaut", 101, 75).save(tmp_path / "x.png")
    settings = ["model=flux3_klein", f"model.pretrained_model_name_or_path={repository}", "model.dtype=float32"]
    request = [f"image={tmp_path / 'x.png'}", "prompt=make it snow", "num_inference_steps=3", "seed=11"]
    run("predict", *settings, *request, f"output_dir={tmp_path / 'out'}")
    call = {"prompt": "make it snow", "image": photograph("astronaut", 101, 75), "num_inference_steps": 3}
    generator = torch.Generator().manual_seed(11)
    [expected] = load_stock(repository)(4.0, **call, generator=generator, output_type="np").images
    [record] = records(tmp_path / "out")
    own = pixels(tmp_path / "out" / record["file"])
    assert own.shape == (75, 101, 3)
    assert np.abs(own - (expected * 255).round().astype(int)).max() <= 1
    assert (record["width"], record["height"]) == (101, 75)


def test_prompts_of_several_windows_are_encoded_singly_and_not_batched(module, tmp_path):
    long = "make it snow, and then " * 5
    parts = module.base.components
    [count], most = module.prompt_tokens(parts, [long])
    own = module.encode_prompt(parts, long, [])["prompt_embeds"]
    assert (len(own), most) == (-(-count // 80) * 80, 8192)
    assert len(own) == 160 > len(module.encode_prompt(parts, "x", [])["prompt_embeds"])
    expected = REFERENCE.embeddings(load_stock(module.base.components.repository), long, [])["prompt_embeds"]
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert module.text_length("word " * 100, []) == 160
    raws = [raw_sample(module, [], tmp_path, index) for index in range(2)]
    raws[1].prompts = [long]
    with pytest.raises(UserError, match="this model masks none"):
        module.encoder(collate_pixels(raws))


def test_without_references_their_parameters_have_a_zero_gradient(module, tmp_path):
    """DDP waits for each gradient; an optimizer has the same state for all parameters."""
    found = []
    for sizes in ([], [(64, 64)]):
        module.transformer.zero_grad()
        losses(module, module.encoder(raw_sample(module, condition_images(sizes), tmp_path))).mean().backward()
        found.append({name: one.grad for name, one in trainable(module.transformer).items()})
    without, used = found
    assert all(gradient is not None for gradient in (*without.values(), *used.values()))
    references = {name for name in used if "image_cond" in name}
    assert references
    assert all((without[name] == 0).all() == (name in references) for name in without)
    assert not any((gradient == 0).all() for gradient in used.values())


@pytest.mark.slow
@pytest.mark.parametrize("more", [["model.offload.blocks=8"], ["model.offload.blocks=5", "model/quantization=fp8"]])
def test_blocks_are_streamed_with_and_without_references(repository, tmp_path, more):
    """Steps alternate: the blocks for references are skipped in every second one."""
    full = ["model.gradient_checkpointing=full"]
    found = []
    for settings in ([*full, *more[1:]], [*full, *more]):
        module, made = REFERENCE.build(repository, *settings), []
        for sizes in ([(64, 64)], [], [(64, 96), (64, 64)], []):
            raw = raw_sample(module, condition_images(sizes), tmp_path)
            loss = losses(module, module.encoder(raw)).mean()
            loss.backward()
            made.append(loss.detach())
        found.append([*made, *(parameter.grad for parameter in trainable(module.transformer).values())])
    for whole, streamed in zip(*found, strict=True):
        assert torch.equal(whole, streamed)


@pytest.mark.slow
def test_norms_of_queries_stay_in_float32_however_the_transformer_is_loaded(repository):
    for more in ([], ["model/quantization=fp8"], ["model.offload.blocks=2", "model.gradient_checkpointing=full"]):
        transformer = REFERENCE.build(repository, "model.dtype=bfloat16", *more).transformer
        attention = transformer.single_transformer_blocks[0].attn
        assert attention.norm_q.weight.dtype == attention.norm_k.weight.dtype == torch.float32
        assert transformer.context_embedder.weight.dtype == torch.bfloat16


def test_schedule_is_that_of_the_pipelines_blocks(module, repository, tmp_path):
    """A repository with a scheduler of its own has that one."""
    specs = {spec.name: spec for spec in Flux3AutoBlocks().expected_components}
    scheduler = module.base.components["scheduler"]
    assert dict(scheduler.config) == dict(specs["scheduler"].create().config)
    assert module.base.dynamic_shift(64) == 6.93
    other = shutil.copytree(repository, tmp_path / "other")
    scheduler.register_to_config(shift=2.0)
    scheduler.save_pretrained(other / "scheduler")
    origin = {"pretrained_model_name_or_path": str(other), "revision": None, "subfolder": "scheduler", "variant": None}
    entry = [None, None, origin | {"type_hint": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}]
    edit_json(other / "modular_model_index.json", scheduler=entry)
    assert REFERENCE.build(other).base.dynamic_shift(64) == 2.0


@pytest.mark.slow
def test_component_may_be_in_another_repository(module, repository, tmp_path):
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns("vae"))
    shutil.copytree(repository / "vae", elsewhere)
    index = json.loads((copy / "modular_model_index.json").read_text())
    index["vae"][2] |= {"pretrained_model_name_or_path": str(elsewhere), "subfolder": ""}
    edit_json(copy / "modular_model_index.json", vae=index["vae"])
    own, other = load_component(str(repository), "vae"), load_component(str(copy), "vae")
    assert all(torch.equal(one, two) for one, two in zip(own.parameters(), other.parameters(), strict=True))
    built = REFERENCE.build(copy)
    assert built.base.vae_config == module.base.vae_config
    assert torch.equal(built.base.vae_tensor("bn.running_mean"), module.base.vae_tensor("bn.running_mean"))


def test_distilled_transformer_is_refused_in_training_and_for_sampling(repository, tmp_path):
    distilled = shutil.copytree(repository, tmp_path / "distilled")
    edit_json(distilled / "transformer" / "config.json", flow_map=True)
    base, module = (
        instantiate(compose("train", "model=flux3_klein", f"model.pretrained_model_name_or_path={path}").model)
        for path in (repository, distilled)
    )
    for check in (module.check, SamplingTransformer(base, str(distilled)).check):
        with pytest.raises(UserError, match=r"is distilled to a flow map, .*: train on black-forest-labs/flux-3-image"):
            check()


@pytest.mark.slow
def test_code_of_the_report_creates_the_image_of_predict(run, arguments, repository, tmp_path, monkeypatch):
    settings = arguments("flux3_klein", tmp_path / "run", 2, "optimizer.lr=3e-2")
    run("train", *settings)
    photograph("astronaut", 64, 64).save(tmp_path / "photo.png")
    module = instantiate(compose("train", *settings, "model.sampling.num_inference_steps=2").model)
    names = Names(
        {"lora": "run"}, str(tmp_path / "run" / "lora" / "last"), "flux3_klein", [str(tmp_path / "photo.png")]
    )
    code = commands(module, names, 0, None)["In diffusers"]
    monkeypatch.chdir(tmp_path)
    assert "guider.guidance_scale = 4.0" in code
    exec(code.replace("PATH_TO/flux3_klein", str(repository)).replace("1024", "64").replace("...", "snow"), {})
    request = [f"image={tmp_path / 'photo.png'}", "prompt=snow", "num_inference_steps=2", "width=64", "height=64"]
    run("predict", f"lora={tmp_path / 'run'}", *request, "seed=0", "output_dir=out")
    [record] = records(tmp_path / "out")
    assert np.abs(pixels(tmp_path / "edited.png") - pixels(tmp_path / "out" / record["file"])).max() <= 1


@pytest.mark.slow
def test_transformer_that_was_trained_whole_is_a_modular_repository(run, arguments, repository, tmp_path):
    """The index names no origin of the components: on the hub, diffusers would load the base's instead."""
    settings = [one for one in arguments("flux3_klein", tmp_path / "run", 2) if not one.startswith("adapter.")]
    run("train", *settings, "adapter=full", "optimizer.lr=1e-2")
    written = tmp_path / "run" / "model" / "last"
    index = json.loads((written / "modular_model_index.json").read_text())
    assert index["vae"][:2] == ["diffusers", "AutoencoderKLFlux2"]
    assert str(repository) not in json.dumps(index)
    request = ["prompt=snow", "num_inference_steps=2", "width=64", "height=48", "seed=11", "guidance_scale=3"]
    model = ["model=flux3_klein", "model.dtype=float32", f"model.pretrained_model_name_or_path={written}"]
    run("predict", *model, *request, f"output_dir={tmp_path / 'out'}")
    call = {"prompt": "snow", "num_inference_steps": 2, "width": 64, "height": 48, "output_type": "np"}
    expected, base = (
        load_stock(one)(3.0, **call, generator=torch.Generator().manual_seed(11)).images[0]
        for one in (written, repository)
    )
    [record] = records(tmp_path / "out")
    own = pixels(tmp_path / "out" / record["file"])
    assert np.abs(own - (expected * 255).round().astype(int)).max() <= 1
    assert np.abs(expected - base).max() > 0.02
