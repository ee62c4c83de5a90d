"""Sample images of training equal those of predict.py, whatever is set."""

import io
import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules.edits import EditsDataModule, own_edits
from foundation.errors import UserError
from foundation.notes import notes
from lightning_modules.family import Sampling
from lightning_modules.lora_files.reading import HEADER_KEY, LoRAFile
from report.images import read_strip
from tasks.edit import requests
from tests.support.commands import compose, short, unloaded
from tests.support.pictures import photograph, pixels, records
from tests.support.stock_pictures import stock_picture
from tests.support.tiny_pipelines import MODELS, edit_json


def results(folder, step):
    return {p.stem: np.asarray(read_strip(p).result) for p in (folder / f"samples/step-{step:06d}").glob("*.png")}


def test_sample_images_of_training_equal_predictions_to_the_bit(run, gallery, pairs, tmp_path):
    shown = gallery("shown")
    image = pairs / "control_images" / "03.png"
    run("predict", f"lora={shown.folder}", "prompt=mirror picture 3", f"image={image}", f"output_dir={tmp_path}")
    assert np.array_equal(pixels(tmp_path / "03.png"), results(shown.folder, 4)["03"])


# A Lightning LoRA's schedule: fixed shift 3, 3 t / (1 + 2 t) of t = 1, 3/4, 1/2, 1/4.
LIGHTNING = [1.0, 0.9, 0.75, 0.5, 0.0]


@pytest.mark.parametrize("terminal", [None, 0.1])
def test_fixed_shift_is_the_closed_form(repositories, terminal):
    own = FlowMatchEulerDiscreteScheduler.from_pretrained(repositories["qwen_image_edit"], subfolder="scheduler")
    sigmas = [1.0, 0.75, 0.5, 0.25]
    own.set_timesteps(sigmas=sigmas, mu=0.7)
    assert own.sigmas[-2] == pytest.approx(0.02, abs=1e-6), "the repository's: dynamic, stretched to its own terminal"
    fixed = Sampling(4, None, None, None, shift=3.0, shift_terminal=terminal).scheduler(own)
    fixed.set_timesteps(sigmas=sigmas, mu=0.7)
    least = 0.5 if terminal is None else terminal
    expected = [1 - (1 - sigma) * (1 - least) / 0.5 for sigma in LIGHTNING[:-1]]
    torch.testing.assert_close(fixed.sigmas, torch.tensor([*expected, 0.0]))
    assert dict(Sampling(4, None, None, None).scheduler(own).config) == dict(own.config)


def sampler_of(repository, model, *more):
    notes.begin_run(True, "")
    settings = [f"model={model}", f"model.pretrained_model_name_or_path={repository}", "model.dtype=float32"]
    return instantiate(compose("predict", *settings, *more).model, adapter=None, optimization=None).sampler


def test_shift_that_cannot_be_followed_is_refused_before_weights(repositories, tmp_path):
    copy = shutil.copytree(repositories["flux_kontext"], tmp_path / "heun")
    edit_json(copy / "model_index.json", scheduler=["diffusers", "FlowMatchHeunDiscreteScheduler"])
    with pytest.raises(UserError, match=r"shift=3: FlowMatchHeunDiscreteScheduler of .* takes no fixed shift"):
        sampler_of(copy, "flux_kontext", "model.sampling.shift=3").check()
    sampler_of(copy, "flux_kontext").check()
    with pytest.raises(UserError, match=r"shift_terminal=0.1: without shift, the repository's scheduler sets both"):
        sampler_of(repositories["flux_kontext"], "flux_kontext", "model.sampling.shift_terminal=0.1").check()


@pytest.mark.parametrize(
    ("model", "settings", "note"),
    [
        ("qwen_image_edit", ["guidance_scale=3"], "guidance_scale=3 has no effect: this transformer does not"),
        ("qwen_image_edit", ["true_cfg_scale=1", "negative_prompt=x"], "negative_prompt has no effect without true"),
        ("flux_kontext", ["negative_prompt=blurry"], "negative_prompt has no effect without true_cfg_scale above 1"),
        ("longcat_image_edit", ["guidance_scale=1", "negative_prompt=x"], "negative_prompt has no effect without guid"),
        ("flux_kontext", ["true_cfg_scale=2"], "true_cfg_scale=2 guides; diffusers would not without negative_prompt"),
        ("qwen_image_edit", ["negative_prompt=null"], "true_cfg_scale=4 guides; diffusers would not"),
        ("flux_kontext", ["true_cfg_scale=2", "negative_prompt=''"], None),
        ("longcat_image_edit", ["negative_prompt=null"], None),
        ("flux2_klein_4b", ["guidance_scale=0.5"], "guidance_scale=0.5: this transformer guides above 1"),
        ("flux2_dev", ["guidance_scale=0.5"], "guidance_scale=0.5: this transformer guides above 1"),
        ("flux_kontext", ["guidance_scale=0.5"], "guidance_scale=0.5: this transformer guides above 1"),
        ("z_image", ["guidance_scale=0.5"], None),
        ("flux2_klein_4b", [], None),
        ("flux_kontext", ["guidance_scale=3"], None),
        ("qwen_image_edit", ["negative_prompt=blurry"], None),
    ],
)
def test_sampling_settings_without_effect_are_noted(repositories, caplog, model, settings, note):
    sampler_of(repositories[model], model, *(f"model.sampling.{setting}" for setting in settings)).check()
    assert [message.startswith(f"note: {note}") for message in caplog.messages] == [True] * (note is not None)


def test_guidance_of_a_distilled_klein_is_noted(repositories, tmp_path, caplog):
    copy = shutil.copytree(repositories["flux2_klein_4b"], tmp_path / "copy")
    edit_json(copy / "model_index.json", is_distilled=True)
    sampler = sampler_of(copy, "flux2_klein_4b")
    sampler.check()
    sampler.check()
    assert caplog.messages == ["note: guidance_scale=4 has no effect: this transformer does not follow it"]


@pytest.fixture
def own_images(datasets, tmp_path):
    """Save two images with their own instructions and no targets, one with a further control."""
    root = tmp_path / "own"
    root.mkdir()
    for name, prompt in (("a", "make it rain"), ("b", "make it [trigger]")):
        photograph("coffee", 48, 32).save(root / f"{name}.png")
        (root / f"{name}.txt").write_text(prompt)
    photograph("rocket", 32, 32).save(root / "b_control_1.png")
    return root


@pytest.mark.slow
def test_images_without_targets_are_sampled_as_predict_edits_them(run, arguments, own_images, tmp_path):
    """Prediction follows the schedule and the negative prompt of the file's header."""
    model, common = "qwen_image_edit_plus", ["model.sampling.num_inference_steps=2", "optimizer.lr=3e-2"]
    common += ["data.trigger_word=snow"]  # of b
    common += ["callbacks.sample_images.count=1", f"sample_root={own_images}", "data.val_count=1"]
    common += [f"data.cache_dir={tmp_path / 'cache'}", "model.sampling.negative_prompt=blurry"]
    settings = arguments(model, tmp_path / "run", 1, *common, "model.sampling.shift=3.0", shown=True)
    run("train", *settings)
    run("predict", f"lora={tmp_path / 'run'}", f"image={own_images}", f"output_dir={tmp_path / 'out'}")
    sampled = results(tmp_path / "run", 1)
    assert len(sampled) == 3
    for name in "ab":
        assert np.array_equal(sampled[f"{name}_p00"], pixels(tmp_path / "out" / f"{name}.png"))
        strip = read_strip(tmp_path / f"run/samples/step-000001/{name}_p00.png")
        assert strip.target is None
        assert len(strip.controls) == {"a": 1, "b": 2}[name]
        assert strip.prompt == {"a": "make it rain", "b": "make it snow"}[name]
        assert strip.prompt in (tmp_path / "run" / "report.html").read_text()
    edits = {(record["prompt"], record["shift"]) for record in records(tmp_path / "out")}
    assert edits == {("make it rain", 3.0), ("make it snow", 3.0)}


@pytest.mark.slow
def test_prompts_without_images_are_sampled_by_text_to_image_models(run, arguments, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red dog\na blue dog\n")
    more = [f"sample_root={tmp_path / 'prompts.txt'}", "model.sampling.num_inference_steps=1", "model.resolution=64"]
    run("train", *arguments("z_image", tmp_path / "run", 1, *more, "callbacks.sample_images.count=0", shown=True))
    run("predict", f"lora={tmp_path / 'run'}", f"prompts_file={tmp_path / 'prompts.txt'}", f"output_dir={tmp_path / 'out'}")  # fmt: skip  # noqa: E501
    sampled = results(tmp_path / "run", 1)
    assert list(sampled) == ["image_p00", "image_p01"]
    for name, picture in sampled.items():
        [path] = (tmp_path / "out").glob(f"{name}_*.png")
        assert np.array_equal(picture, pixels(path))


@pytest.mark.parametrize(
    ("prompt", "word", "expected"),
    [
        ("[trigger] in snow", "ohwx", "ohwx in snow"),
        ("a [trigger], then [trigger]", "sks, ohwx", "a sks, ohwx, then sks, ohwx"),
        ("in snow", "ohwx", "in snow"),
        ("[trigger]", None, None),
    ],
)
def test_the_placeholder_in_prompts_is_the_trigger_word(tmp_path, caplog, prompt, word, expected):
    """Keep it, with a note, if nothing names the word."""
    photograph("coffee", 32, 32).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(prompt)
    (tmp_path / "prompts.txt").write_text(prompt)
    request = (None, [0], [1.0], None, None, 1024, 1)
    image = str(tmp_path / "a.png")
    made = [
        EditsDataModule(image, None, None, *request, trigger_word=word),
        EditsDataModule(image, [prompt], None, *request, trigger_word=word),
        EditsDataModule(image, None, str(tmp_path / "prompts.txt"), *request, trigger_word=word),
        own_edits(image, 0, 1024, word),
    ]
    assert [one.edits[0].prompts for one in made] == [[expected or prompt]] * 4
    assert ("[trigger] stays as it is" in caplog.text) == (expected is None)


@pytest.mark.parametrize(
    ("size", "asked", "trained", "seen", "noted"),
    [
        ((320, 320), {}, 0, (64, 64), False),  # the model's own size by default
        ((320, 320), {}, 128, (128, 128), False),  # the LoRA's
        ((64, 64), {}, 16, (64, 64), True),
        ((320, 320), {"max_area": 320 * 320}, 0, (320, 320), True),
        ((320, 320), {"width": 192, "height": 192}, 0, (192, 192), True),
        ((32, 32), {}, 0, (32, 32), False),
        ((16, 32), {}, 0, (16, 32), True),
    ],
)
def test_images_are_edited_at_the_size_of_training_and_others_are_noted(
    tiny, tmp_path, caplog, size, asked, trained, seen, noted
):
    photograph("coffee", *size).save(tmp_path / "a.png")
    settings = {"height": None, "width": None, "max_area": None} | asked
    data = EditsDataModule(
        str(tmp_path / "a.png"), "x", None, None, [0], [1.0], batch_size=1, trained=trained, **settings
    )
    data.configure_for(unloaded(tiny, "flux_kontext", "model.resolution=64"))
    assert data._windows(data.edits[0].paths)[1] == seen
    side = trained or 64
    assert (f"a.png has {seen[0]}x{seen[1]} pixels here, far from about {side}x{side}" in caplog.text) == noted


@pytest.mark.parametrize(
    ("sides", "trained"), [([64, 96], 96), ([10**6], 0), ([-64, True, None], 0), (["64", [64], {}, 64], 64)]
)
def test_the_size_of_training_is_read_from_headers_that_name_a_plausible_one(tmp_path, sides, trained):
    photograph("coffee", 64, 64).save(tmp_path / "a.png")
    files = [tmp_path / f"{number}.safetensors" for number in range(len(sides))]
    for side, file in zip(sides, files, strict=True):
        header = {HEADER_KEY: json.dumps({"resolution": side})}
        safetensors.torch.save_file({"to_q.lora_A.weight": torch.zeros(4, 8)}, file, header)
    cfg = compose("predict", f"image={tmp_path / 'a.png'}", "prompt=x")
    assert requests(cfg, None, [1.0], [LoRAFile(file) for file in files]).trained == trained


def test_mistakes_in_user_images_are_one_line(own_images, tmp_path, repositories):
    (own_images / "b.txt").unlink()
    with pytest.raises(UserError, match=r"sample_root: .*b.png has no instruction: write it into .*b.txt$"):
        own_edits(str(own_images), 0, 1024)
    (own_images / "b.txt").write_text("x")
    module = sampler_of(repositories["qwen_image_edit"], "qwen_image_edit").family
    with pytest.raises(UserError, match=r"takes at most 1 condition image, but .*b.png, .*b_control_1.png are 2"):
        own_edits(str(own_images), 0, 1024).configure_for(module)
    Image.new("RGB", (8, 8)).save(own_images / "b_control_1.png")
    with pytest.raises(UserError, match=r"b_control_1.png is 8x8: both sides must be at least 16"):
        own_edits(str(own_images), 0, 1024)


@pytest.mark.slow
def test_several_references_of_one_edit_are_in_one_row(run, repositories, tmp_path, monkeypatch):
    """The references have different sizes, as in the stock pipeline."""
    model, names = "qwen_image_edit_plus", ("a.png", "b.png")
    for name, size in zip(names, ((64, 32), (32, 48)), strict=True):
        photograph("coffee", *size).save(tmp_path / name)
    paths = [tmp_path / name for name in names]
    settings = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}", "model.dtype=float32"]
    request = ["num_inference_steps=2", "seed=11", "width=64", "height=32", "true_cfg_scale=1"]
    request += ["prompt=x", f"image=[{paths[0]},{paths[1]}]", f"output_dir={tmp_path / 'out'}"]
    run("predict", *settings, *MODELS[model].settings, *request)
    call = {"num_inference_steps": 2, "width": 64, "height": 32, "true_cfg_scale": 1.0}
    images = [Image.open(path) for path in paths]
    stock = stock_picture(repositories[model], None, monkeypatch, prompt="x", image=images, **call)
    assert np.abs(pixels(tmp_path / "out" / "a.png") - (stock * 255).round().astype(int)).max() <= 1
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
    assert records(tmp_path / "out")[0]["image"] == list(map(str, paths))


def test_a_max_area_that_shrinks_nothing_is_noted(run, tmp_path):
    request = ["prompt=x", "width=32", "height=32", "num_inference_steps=1"]
    text = run("predict", *request, "max_area=4096", f"output_dir={tmp_path / 'noted'}").text
    assert "note: max_area=4096 has no effect: no image is shrunk to it" in text


def test_user_images_without_sample_images_are_refused(refuses, own_images):
    words = "callbacks.sample_images=null samples no images. Leave one out."
    refuses(f"sample_root={own_images}", "callbacks.sample_images=null", words=words)


class Watching(CSVLogger):
    """A logger that takes images, as that of Weights & Biases."""

    shown: ClassVar[list] = []

    def log_image(self, key, images, step=None):
        self.shown.append((key, [np.asarray(image).copy() for image in images], step))


@pytest.mark.slow
def test_settings_and_sample_images_go_to_every_logger_that_takes_them(run, tiny, pairs, tmp_path):
    arguments = [one for one in short(tiny, pairs, tmp_path / "run", 2, shown=True) if one != "logger=none"]
    loggers = [
        "logger=[tensorboard,csv]", "+logger.own._target_=tests.test_sampled_alike.Watching",
        f"+logger.own.save_dir={tmp_path / 'own'}",
    ]  # fmt: skip
    Watching.shown.clear()
    run("train", *arguments, *loggers, "callbacks.sample_images.count=2", "model.sampling.num_inference_steps=1")
    strips = sorted((tmp_path / "run/samples").glob("*/*.png"))
    assert len(strips) == 4
    expected = {(f"samples/{path.stem}", int(path.parent.name[-6:])): pixels(path) for path in strips}
    shown = {(key, step): image for key, [image], step in Watching.shown}
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0}).Reload()
    board = {
        (tag, event.step): np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        for tag in events.Tags()["images"]
        for event in events.Images(tag)
    }
    for found in (shown, board):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    files = [*tmp_path.glob("run/**/hparams.yaml"), *tmp_path.glob("own/**/hparams.yaml")]
    assert len(files) == 3
    for file in files:
        settings = yaml.safe_load(file.read_text())
        assert settings["adapter"]["rank"] == 4
        assert settings["optimizer"]["lr"] == 1e-4 != config["optimizer"]["lr"], "resolved"
        assert settings["model"]["sampling"]["num_inference_steps"] == 1
        assert settings["output_dir"] == ".../run", "as in report.html, without folders of this machine"
        assert settings.keys() == config.keys() - {"defaults", "hydra"}
