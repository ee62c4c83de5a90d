"""Depth maps and poses, by tiny models of the real classes."""

import colorsys
import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from cli.arguments import read_values
from datamodules.images import estimators
from datamodules.images.estimators import DEPTH, LIMBS, depth, identity, pose
from datamodules.images.recipe_images import RecipeImage
from datamodules.images.recipes import Chain, Step, as_chain
from foundation.errors import UserError
from foundation.hub import _hub_file
from tests.support.caches import encoded
from tests.support.pictures import photograph
from tests.support.tiny_estimators import BODY, build_estimator, depth_anything, dpt, vitpose, yolos

PHOTO = photograph("astronaut", 96, 64)
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folders of models by name."""
    folder = tmp_path_factory.mktemp("estimators")
    for build, *arguments in ((depth_anything,), (dpt,), (vitpose,), (yolos, PHOTO)):
        build_estimator(folder / build.__name__, build, *arguments)
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_loaded(built, monkeypatch):
    monkeypatch.setattr("datamodules.images.estimators.PEOPLE", str(built / "yolos"))
    monkeypatch.setattr("datamodules.images.recipes.PEOPLE", str(built / "yolos"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _forget()


def _forget():
    """Forget models, as a new process would."""
    _hub_file.cache_clear()
    identity.cache_clear()
    estimators._loaded.cache_clear()


@pytest.fixture
def copied(built, tmp_path):
    """A function that copies Depth Anything, with changes of its config.json."""

    def copied(**changes):
        folder = shutil.copytree(built / "depth_anything", tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return copied


def depth_of(folder):
    return np.asarray(depth(PHOTO, str(folder), RANDOM))


@pytest.mark.parametrize("name", ["depth_anything", "dpt"])
def test_depth_is_that_of_transformers_pipeline_stretched_to_all_levels(built, name):
    found = depth_of(built / name)
    assert found.shape == (64, 96, 3)
    assert (found == found[..., :1]).all()
    expected = transformers.pipeline("depth-estimation", model=str(built / name), device="cpu")(PHOTO)
    near = expected["predicted_depth"]
    near = (near - near.min()) / (near.max() - near.min())
    np.testing.assert_array_equal(found[..., 0], (255 * near).round())
    assert {0, 255} <= set(found.flat)
    # The pipeline's own image is rounded down.
    assert set(np.unique(found[..., 0] - np.asarray(expected["depth"], int))) == {0, 1}


def test_equal_depths_are_black(built, tmp_path):
    folder = shutil.copytree(built / "dpt", tmp_path / "flat")
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.zeros_like(one) for name, one in weights.items() if name.startswith("head")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert not depth_of(folder).any()


def joints_by_transformers(built, image):
    """Return the joints of each person by their numbers, as the documentation of ViTPose computes them."""
    with torch.no_grad():
        finder = transformers.AutoImageProcessor.from_pretrained(built / "yolos")
        model = transformers.AutoModelForObjectDetection.from_pretrained(built / "yolos")
        outputs = model(**finder(images=image, return_tensors="pt"))
        sizes = torch.tensor([(image.height, image.width)])
        [found] = finder.post_process_object_detection(outputs, target_sizes=sizes, threshold=0.3)
        boxes = found["boxes"][found["labels"] == 1].numpy()
        if not len(boxes):
            return []
        boxes[:, 2] -= boxes[:, 0]
        boxes[:, 3] -= boxes[:, 1]
        processor = transformers.AutoImageProcessor.from_pretrained(built / "vitpose")
        model = transformers.VitPoseForPoseEstimation.from_pretrained(built / "vitpose")
        outputs = model(**processor(image, boxes=[boxes], return_tensors="pt"))
        [people] = processor.post_process_pose_estimation(outputs, boxes=[boxes], threshold=0.3)
    return [dict(zip(one["labels"].tolist(), one["keypoints"].numpy(), strict=True)) for one in people]


def distance(points, start, end):
    """Return the distances of points from a segment."""
    along, offset = end - start, points - start
    share = np.clip(offset @ along / max(along @ along, 1e-9), 0, 1)
    return np.linalg.norm(offset - share[:, None] * along, axis=1)


def test_pose_draws_limbs_between_the_joints_that_transformers_finds(built):
    drawn = np.asarray(pose(PHOTO, str(built / "vitpose"), RANDOM))
    [joints] = joints_by_transformers(built, PHOTO)
    assert set(joints) <= set(BODY)
    limbs = {index for index, limb in enumerate(LIMBS) if {*limb} <= {*joints}}
    assert 5 < len(limbs) < len(LIMBS)
    explained = (drawn == 0).all(2)
    for index in limbs:
        colour = np.round(255 * np.array(colorsys.hsv_to_rgb(index / len(LIMBS), 1, 1)))
        own, (start, end) = (drawn == colour).all(2), (joints[one] for one in LIMBS[index])
        rows, columns = own.nonzero()
        assert (distance(np.stack([columns, rows], 1), start, end) <= 2).all()
        # No other colour than of limbs that cross it.
        explained |= own
    assert explained.all(), "limbs without a joint are not drawn"
    middle = np.mean([joints[one] for one in LIMBS[max(limbs)]], 0)
    assert drawn[round(middle[1]), round(middle[0])].any()


def test_limbs_are_alike_on_both_sides():
    """COCO numbers the joints of the left side odd, those of the right side even, after the nose."""
    mirrored = [[joint and joint + (1 if joint % 2 else -1) for joint in limb] for limb in LIMBS]
    assert {*map(frozenset, mirrored)} == {*map(frozenset, LIMBS)}


def test_an_image_without_people_is_black(built):
    nobody = Image.new("RGB", PHOTO.size)
    assert joints_by_transformers(built, nobody) == []
    assert not np.asarray(pose(nobody, str(built / "vitpose"), RANDOM)).any()


class Estimates(torch.utils.data.Dataset):
    """The depth map and the pose of the photograph, estimated where they are read."""

    def __init__(self, built):
        self.images = [(depth, str(built / "depth_anything")), (pose, str(built / "vitpose"))]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        estimate, name = self.images[index]
        return np.asarray(estimate(PHOTO, name, RANDOM))


def test_estimates_are_the_same_bits_again_and_in_a_data_worker(built):
    data = Estimates(built)
    first = list(data)
    _forget()
    for one, other, third in zip(first, data, DataLoader(data, batch_size=None, num_workers=1), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)


def test_threads_share_one_model_and_leave_random_numbers_alone(built):
    expected, together = depth_of(built / "depth_anything"), threading.Barrier(4)
    _forget()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def estimate(_):
        together.wait()
        return depth_of(built / "depth_anything")

    with ThreadPoolExecutor(4) as pool:
        assert all((one == expected).all() for one in pool.map(estimate, range(4)))
    assert estimators._loaded.cache_info().misses == 1
    assert (torch.get_rng_state() == states[0]).all()
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def refused(name, words, estimate=depth):
    with pytest.raises(UserError, match=words) as caught:
        estimate(PHOTO, str(name), RANDOM)
    assert str(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused_in_one_line(built, copied, tmp_path):
    refused(tmp_path, r"cannot be used \(it has no config.json\). Name a folder or hub id with config.json")
    refused(tmp_path / "absent", "is neither a folder here nor the name of a repository")
    refused(DEPTH, "huggingface.co cannot be reached: check the network .* or pass the path of a downloaded copy")
    refused(built / "yolos", "cannot be used .*YolosConfig.*AutoModelForDepthEstimation")
    refused(built / "depth_anything", "cannot be used", pose)
    folder = copied()
    weights = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in weights.items() if "head" not in name}, folder / "model.safetensors")
    refused(folder, "it has no weights for the head of DepthAnythingForDepthEstimation")
    (folder / "model.safetensors").write_bytes((built / "depth_anything/model.safetensors").read_bytes()[:1000])
    refused(folder, "cannot be used .*header")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    refused(folder, "no file named model.safetensors .* Name a folder or hub id with .* model.safetensors")
    (folder / "preprocessor_config.json").unlink()
    refused(folder, "cannot be used .*image processor")


def test_a_model_runs_no_code_of_its_own(built, copied, monkeypatch, tmp_path):
    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail("it asks at the terminal"))
    expected = depth_of(built / "depth_anything")
    own = {"AutoConfig": "own.Own", "AutoModelForDepthEstimation": "own.Own", "AutoImageProcessor": "own.Own"}
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n"
    kernel = {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"}
    backbone = json.loads((built / "depth_anything/config.json").read_text())["backbone_config"]
    folder = copied(auto_map=own, **kernel, backbone_config=backbone | kernel)
    (folder / "own.py").write_text(code)
    np.testing.assert_array_equal(depth_of(folder), expected)
    _, model = estimators._loaded("AutoModelForDepthEstimation", str(folder))
    assert {one._attn_implementation for one in (model.config, model.backbone.config)} == {"eager", "sdpa"}
    _forget()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    refused(folder, "cannot be used")
    assert not (tmp_path / "ran").exists()


def test_models_in_half_precision_compute_in_single(built, copied):
    assert estimators._loaded("AutoModelForDepthEstimation", str(copied(dtype="float16")))[1].dtype == torch.float32


def test_values_from_outside_may_name_a_model():
    [given] = read_values(["data.control=depth"], "train")
    assert given == "data.control.recipe=depth"
    [given] = read_values(["data.control={depth: my/model}"], "train")
    given = OverridesParser.create().parse_overrides([given])[0]
    assert (given.key_or_group, given.value()) == ("data.control.recipe", [{"depth": "my/model"}])
    settings = {"recipe": {"depth": "~/model"}, "shuffle": False, "variants": 1, "prompts": None, "mask": False}
    assert str(as_chain("data.control", **settings)) == f"depth ({Path.home() / 'model'})"


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    for name in ("astronaut", "chelsea", "coffee"):
        photograph(name, 64, 64).save(root / f"{name}.png")
    return root


@pytest.mark.slow
def test_a_cache_is_trained_on_without_its_estimator(run, built, photos, tmp_path, monkeypatch):
    # The cache is built once, and again when the weights have changed.
    model = shutil.copytree(built / "depth_anything", tmp_path / "model")
    common = ["model=embedded", f"data.root={photos}", f"data.control={{depth: {model}}}", "data.num_workers=0"]
    common += ["trainer.accelerator=cpu", "data=cached", f"data.cache_dir={tmp_path / 'cache'}"]
    assert encoded(run("predict", "task=cache", *common)) == 3
    run("predict", "task=preview", *common, f"output_dir={tmp_path / 'preview'}")
    assert list((tmp_path / "preview").glob("*.png"))
    with monkeypatch.context() as patch:
        _forget()
        patch.setattr(estimators, "_loaded", lambda *model: pytest.fail("the estimator runs"))
        quiet = ["trainer.max_steps=2", "callbacks.sample_images=null", "callbacks.report=null", "logger=none"]
        outcome = run("train", *common, *quiet, f"output_dir={tmp_path / 'run'}")
        assert encoded(outcome) == 0
    assert (tmp_path / "run/lora/last/pytorch_lora_weights.safetensors").exists()
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * one for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"})
    _forget()
    assert encoded(run("predict", "task=cache", *common)) == 3
    _forget()
    shutil.rmtree(model)
    error = run("predict", "task=cache", *common, ok=False).error
    assert f"{model} is neither a folder here nor" in error


def test_changed_weights_are_other_images(built, tmp_path):
    """A copy of the model elsewhere, written later, makes the same ones."""
    model, people = (str(shutil.copytree(built / name, tmp_path / name)) for name in ("vitpose", "yolos"))
    known = {identity(str(built / "vitpose")), identity(str(built / "yolos"))}
    assert {identity(model), identity(people)} == known

    def recipe(step):
        _forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("datamodules.images.recipes.PEOPLE", people)
            chain = Chain((Step("blur", (1, 2)), step), False, 1, (), False)
            return RecipeImage(tmp_path / "x.png", chain, 0, "x").recipe

    steps = [Step("depth", str(built / "dpt")), Step("pose", model)]
    first = [recipe(step) for step in steps]
    for folder in (people, model):
        before = recipe(steps[1])
        Path(folder, "model.safetensors").write_bytes(b"others")
        assert recipe(steps[1]) != before
        assert recipe(steps[0]) == first[0]


def test_a_model_of_the_hub_is_known_by_its_commit(built, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--depth"
    (repository / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(built / "depth_anything", repository / "snapshots" / commit)
        (repository / "refs/main").write_text(commit)
        _forget()
        assert identity("me/depth") == commit
