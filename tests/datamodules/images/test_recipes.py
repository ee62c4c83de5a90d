"""Condition images that recipes make from targets, and pairs the other way round."""

import io
import shutil

import numpy as np
import pytest
from hydra.errors import InstantiationException
from PIL import Image, ImageFilter, ImageOps
from skimage.color import rgb2gray
from skimage.feature import canny

from datamodules.images.decoding import open_image, open_mask
from datamodules.images.recipe_images import RecipeImage
from datamodules.images.recipes import RECIPES, as_chain, hole_mask, instructions
from datamodules.images.samples import as_roots
from datamodules.images.windows import ConditionImages, Window, load_image, load_mask
from datamodules.pairs import PairDataset
from foundation.errors import UserError
from tests.support.commands import scanned
from tests.support.pictures import photograph

PHOTO = photograph("astronaut", 96, 64)
PLAIN = {"recipe": None, "shuffle": False, "variants": 1, "prompts": None, "mask": False}
DRAWN = [name for name in RECIPES if name not in ("border", "depth", "pose")]


def made(name, strength, seed=0):
    return RECIPES[name].draw(PHOTO, strength, np.random.default_rng(seed))


def chain(recipe, **settings):
    return as_chain("data.control", **PLAIN | {"recipe": recipe} | settings)


@pytest.fixture
def photos(tmp_path):
    """Four photographs without captions, of which one is upright."""
    root = tmp_path / "photos"
    root.mkdir()
    for name, size in {"astronaut": (96, 64), "chelsea": (96, 64), "coffee": (96, 64), "rocket": (64, 96)}.items():
        photograph(name, *size).save(root / f"{name}.png")
    return root


def data_of(root, *overrides):
    return scanned(f"data.root={root}", "data.resolution=64", *overrides)


def batches(data, draw=0):
    dataset = PairDataset(data.training.views, data.sample_set.condition_images)
    return [dataset[(index, draw)] for index in range(len(dataset))]


# Formulas.


def from_pixels(pixels):
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8)).convert("RGB")


def of_pillow(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


GRAY = np.asarray(PHOTO.convert("L"), np.float64)
FORMULAS = {
    ("blur", 2): PHOTO.filter(ImageFilter.GaussianBlur(2)),
    ("noise", 10): from_pixels(np.asarray(PHOTO) + np.random.default_rng(0).normal(0, 10, (64, 96, 3))),
    ("jpeg", 20): of_pillow(PHOTO, 20),
    ("jpeg", 19.7): of_pillow(PHOTO, 20),
    ("downscale", 4): PHOTO.resize((24, 16), Image.Resampling.LANCZOS).resize((96, 64), Image.Resampling.LANCZOS),
    ("grey", 1): ImageOps.grayscale(PHOTO).convert("RGB"),
    ("edges", 1.5): Image.fromarray(canny(rgb2gray(np.asarray(PHOTO)), 1.5)).convert("RGB"),
    ("lines", 3): from_pixels(
        255 * (GRAY + 16) / (np.asarray(PHOTO.convert("L").filter(ImageFilter.GaussianBlur(3))) + 16.0)
    ),
    ("grey", 0): PHOTO,
    ("fade", 0): PHOTO,
    ("dust", 0): PHOTO,
    ("rain_haze", 0): PHOTO,
    ("blur", 0): PHOTO,
    ("noise", 0): PHOTO,
    ("downscale", 1): PHOTO,
}


@pytest.mark.parametrize(("name", "strength"), FORMULAS)
def test_recipes_are_the_formulas_of_the_libraries(name, strength):
    found, expected = np.asarray(made(name, strength)), np.asarray(FORMULAS[name, strength])
    np.testing.assert_array_equal(found, expected)


def test_fade_blends_paper_over_paler_colours():
    levels = np.asarray(PHOTO, np.float64)
    paler = GRAY[..., None] + 0.3 * (levels - GRAY[..., None])
    mean = round(np.asarray(from_pixels(paler).convert("L")).mean())
    faded = 0.65 * (mean + 0.6 * (paler - mean)) + 0.35 * np.array([236, 220, 180])
    np.testing.assert_allclose(np.asarray(made("fade", 1), np.float64), faded, atol=3)  # rounded three times


def test_haze_follows_koschmieders_law_between_the_drops():
    clear = 1 - 0.5 * np.linspace(0.8, 0.3, 64)[:, None, None]
    veiled = np.rint(np.asarray(PHOTO) * clear + 225 * (1 - clear))
    found = np.asarray(made("rain_haze", 0.5), np.float64)
    assert (found == veiled).all(2).mean() > 0.5
    assert (found >= veiled - 1).all(), "drops are white"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(12))
def test_hole_covers_its_share_of_the_area_in_grey(seed, share):
    image, mask = (
        made("hole", share, seed),
        RECIPES["hole"].draw(Image.new("RGB", PHOTO.size), share, np.random.default_rng(seed)),
    )
    inside = np.asarray(mask)[..., 0] == 128
    assert inside.mean() == pytest.approx(share, abs=0.03)
    assert (np.asarray(image)[inside] == 128).all()
    assert (np.asarray(image)[~inside] == np.asarray(PHOTO)[~inside]).all()


@pytest.mark.parametrize("name", DRAWN)
def test_usual_strengths_change_the_image_and_each_seed_draws_another(name):
    results = [np.asarray(made(name, RECIPES[name].usual[0], seed), np.float64) for seed in range(3)]
    assert all(one.shape == (64, 96, 3) for one in results)
    assert all(np.abs(one - np.asarray(PHOTO)).max() > 8 for one in results)
    draws = name in ("noise", "dust", "rain_haze", "hole", "text")
    assert (len({one.tobytes() for one in results}) == 3) is draws


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("size", [(16, 16), (48, 16), (16, 400)])
def test_every_recipe_draws_on_the_smallest_images(name, size):
    image = PHOTO.resize(size)
    for strength in RECIPES[name].usual:
        assert RECIPES[name].draw(image, strength, np.random.default_rng(0)).size == size


# Views.


def test_the_condition_image_is_the_targets_view_through_the_recipe(photos):
    data = data_of(photos, "data.control.recipe={jpeg: 20}", "data.flip=true")
    assert [view.windows[0].flipped for view in data.training.views] == [False, True] * 4
    for view, batch in zip(data.training.views, batches(data), strict=True):
        target = Image.open(view.sample.target)
        target = target.resize(view.windows[0].size, Image.Resampling.LANCZOS)
        target = ImageOps.mirror(target) if view.windows[0].flipped else target
        for found, expected in ((batch.target, target), (batch.controls[0], of_pillow(target, 20))):
            pixels = ((found[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(pixels, np.asarray(expected))


def test_draws_depend_on_seed_sample_view_and_variant_alone(photos, tmp_path):
    """Neither on other samples, nor on their order, nor on the root's place."""
    control = "data.control.recipe=noise", "data.control.variants=3"
    first = {
        (batch.keys[0], index % 3): batch.controls[0] for index, batch in enumerate(batches(data_of(photos, *control)))
    }
    assert len({one.numpy().tobytes() for one in first.values()}) == 12
    (other := tmp_path / "other").mkdir()
    for path in list(photos.iterdir())[:2]:
        path.rename(other / path.name)
    both = data_of(f"[{other},{photos}]", *control)
    for index, batch in enumerate(batches(both)):
        key = batch.keys[0].rpartition("/")[2]
        assert (batch.controls[0] == first[key, index % 3]).all()
    reseeded = batches(data_of(f"[{other},{photos}]", *control, "seed=5"))
    assert all((one.controls[0] != first[one.keys[0].rpartition("/")[2], 0]).any() for one in reseeded)


def test_each_epoch_draws_others_and_the_first_is_that_of_variants(photos):
    """Epoch by epoch, one variant is what several are at once."""
    data, several = (
        data_of(photos, "data.control.recipe={noise: 20}", f"data.control.variants={count}") for count in (1, 3)
    )
    at_once = batches(several)
    for epoch in range(3):
        for number, batch in enumerate(batches(data, draw=4 * epoch + 1)):
            assert (batch.controls[0] == at_once[3 * number + epoch].controls[0]).all()
    assert data.training.repeats == [1] * 4


def test_chains_apply_their_recipes_in_order_or_in_a_drawn_one(photos):
    image = open_image(photos / "coffee.png")
    fixed = RecipeImage(photos / "coffee.png", chain(["blur", {"jpeg": 10}, {"grey": 1}]), 0, "coffee")
    steps = [fixed._strength(index) for index in range(3)]
    expected = image
    for (strength, random), step in zip(steps, fixed.chain.steps, strict=True):
        expected = RECIPES[step.name].draw(expected, strength, random)
    np.testing.assert_array_equal(np.asarray(fixed.made_from(image)), np.asarray(expected))
    drawn = [
        RecipeImage(photos / "coffee.png", chain([{"downscale": 8}, {"noise": 60}], shuffle=True), seed, "coffee")
        for seed in range(12)
    ]
    rough = [np.abs(np.diff(np.asarray(one.made_from(image), float), axis=0)).mean() > 15 for one in drawn]
    assert len(set(rough)) == 2, "noise comes before or after the shrinking"


@pytest.mark.parametrize("framing", [[], ["data.resolution=96"], ["data.batch_size=2", "data.crop=random_cached"]])
def test_border_keeps_the_middle_at_the_targets_own_scale(photos, framing):
    overrides = "data.control.recipe=border", "data.control.variants=6", *framing
    data = data_of(photos, *overrides)
    kinds = set()
    for view, batch in zip(data.training.views, batches(data), strict=True):
        (width, height), (w, h) = (window.size for window in view.windows)
        assert w % 16 == h % 16 == 0
        assert (w, h) != (width, height)
        kinds.add((w < width, h < height))
        left, top = (width - w) // 2, (height - h) // 2
        middle = batch.target[..., top : top + h, left : left + w]
        # Resized as a part instead of a whole, which differs at the edges of the box.
        assert (batch.controls[0] - middle).abs().mean() < 0.02
    assert len(kinds) == 3, "less wide, less high, and both"


def test_a_hole_may_be_the_mask_of_the_loss(photos):
    data = data_of(photos, "data.control.recipe={hole: 0.3}", "data.control.mask=true", "data.control.variants=4")
    assert {names for _, names in data.training.sizes} == {("mask",)}
    for batch in batches(data):
        hole = ((batch.controls[0] + 1) * 127.5 - 128).abs().amax(1) < 0.01
        assert batch.mask.unique().tolist() == [0, 1]
        assert (hole[0] >= (batch.mask[0, 0] == 1)).all()
        changed = (batch.controls[0] != batch.target).any(1)
        assert not (changed[0] & (batch.mask[0, 0] == 0)).any()


@pytest.mark.parametrize("flipped", [False, True])
def test_padded_windows_of_flux3_pad_the_condition_image_and_its_mask_like_the_target(photos, flipped):
    window = ConditionImages(whole_area=64 * 64, most=1).window(96, 64, 64 * 64, flipped)
    assert window.inside != (0, 0, *window.seen)
    grey, hole = (
        RecipeImage(photos / "astronaut.png", chain(recipe), 0, "astronaut", view=window)
        for recipe in ({"grey": 1}, {"hole": 0.3})
    )
    target, control, holed = (load_image(one, window) for one in (grey.image, grey, hole))
    gray = np.asarray(ImageOps.grayscale(from_pixels((target.permute(1, 2, 0).numpy() + 1) * 127.5)))
    assert np.abs((control[0].numpy() + 1) * 127.5 - gray).max() <= 1
    changed, mask = (holed != target).any(0), load_mask(hole, window)[0]
    assert mask.unique().tolist() == [0, 1]
    assert not (changed & (mask == 0)).any()
    assert ((mask == 1) <= ((holed + 1) * 127.5 - 128).abs().amax(0).lt(0.01)).all()


def test_transparency_and_masks_stay_with_their_target(photos):
    picture = PHOTO.convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").resize(PHOTO.size))
    picture.save(photos / "astronaut.png")
    image = RecipeImage(photos / "astronaut.png", chain("noise"), 0, "astronaut")
    window = Window.whole(PHOTO.size)
    target, control = load_image(image.image, window, alpha=True), load_image(image, window, alpha=True)
    assert (target[3] == control[3]).all()
    assert (target[:3] != control[:3]).any()
    Image.new("L", (64, 96), 255).save(photos / "rocket_mask.png")
    data = data_of(photos, "data.control.recipe=noise")
    assert {one.sample.key: one.sample.mask is not None for one in data.training.views}["rocket"]


def test_outside_of_training_the_image_has_the_size_of_training(photos):
    image = RecipeImage(photos / "rocket.png", chain([{"border": 0.5}, {"hole": 0.2}]), 0, "rocket", side=64)
    shown = open_image(image, 16 * 16)
    assert shown.size == image.kept((52, 78))
    assert load_mask(image, Window.whole((48, 32))).shape == (1, 32, 48)
    assert set(np.unique(np.asarray(open_mask(image)))) == {0, 255}


# Instructions.


def test_instructions_are_configured_or_captions_or_the_recipes(photos):
    jpeg = RECIPES["jpeg"].prompts.split(" | ")
    assert instructions(chain("jpeg"), []) == tuple(jpeg)
    assert instructions(chain("jpeg"), ["repair it"]) == ("repair it",)
    assert instructions(chain(["jpeg", "blur"]), [""])[0] == "restore this photo"
    assert instructions(chain(["jpeg", "border"]), [])[0] == "extend the image"
    own = chain("jpeg", prompts=["clean: [caption]", "sharpen"])
    assert instructions(own, ["a cat", "a pet"]) == ("clean: a cat", "clean: a pet", "sharpen")
    assert instructions(own, []) == ()
    (photos / "coffee.txt").write_text("a cup")
    data = data_of(photos, "data.control.recipe=jpeg", "data.prefix='sks '")
    prompts = {sample.key: sample.prompts for sample in data.training.samples}
    assert prompts["coffee"] == ("sks a cup",)
    assert prompts["rocket"] == tuple(f"sks {one}" for one in jpeg)
    assert "the condition images are made by jpeg 5 to 40; instructions: " in "".join(data.notes)
    with pytest.raises(UserError, match=r"data.control: astronaut of .* has no caption, which data.control.prompts"):
        data_of(photos, "data.control.recipe=jpeg", "data.control.prompts=['fix [caption]']")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recipe": "jpg"}, "=jpg: there is no such recipe. Did you mean jpeg?"),
        ({"recipe": ["blur", "lur"]}, "=lur: there is no such recipe. Did you mean blur?"),
        ({"recipe": "xyzzy"}, "=xyzzy: there is no such recipe. Choose blur, noise, "),
        ({"recipe": {"jpeg": 200}}, ": jpeg=200: must be a number from 1 to 95, or a range [LOW,HIGH]"),
        ({"recipe": {"jpeg": [40, 10]}}, ": jpeg=[40, 10]: must be"),
        ({"recipe": {"blur": "much"}}, ": blur=much: must be"),
        ({"recipe": {"blur": [1, 2, 3]}}, ": blur=[1, 2, 3]: must be"),
        ({"recipe": {"noise": float("nan")}}, ": noise=nan: must be"),
        ({"recipe": {"noise": True}}, ": noise=True: must be"),
        ({"recipe": {"depth": 3}}, ": depth=3: must be a model of transformers, as depth-anything/"),
        ({"recipe": [["blur"]]}, "=['blur']: there is no such recipe"),
        ({"recipe": "jpeg", "prompts": ["caption"]}, ".prompts=[caption]: this is a list of one word"),
        ({"recipe": ["border", "border"]}, "=['border', 'border']: border can only be once"),
        ({"recipe": "jpeg", "variants": 0}, ".variants=0: must be a whole number from 1 to 100"),
        ({"recipe": "jpeg", "variants": 2.5}, ".variants=2.5: must be"),
        ({"recipe": "jpeg", "shuffle": 1}, ".shuffle=1: must be true or false"),
        ({"recipe": "jpeg", "prompts": 3}, ".prompts=3: must be text or a list of them or null"),
        ({"recipe": "jpeg", "mask": True}, ".mask=true needs the recipe hole"),
        ({"recipe": ["hole", "border"], "mask": True}, ".mask=true needs the recipe hole"),
        ({"recipe": "jpeg", "varians": 4}, ": there is no varians. Choose recipe, shuffle"),
        ({"jpeg": 9, "variants": 4}, "=variants: there is no such recipe"),
    ],
)
def test_wrong_settings_name_the_value_and_the_remedy(settings, words):
    with pytest.raises(UserError) as caught:
        as_roots("root", {"path": "x", "control": settings}, {"control": PLAIN})
    assert str(caught.value).startswith(f"data.root=x: control{words}")


def test_edges_name_the_library_that_they_need(monkeypatch):
    monkeypatch.setattr("datamodules.images.recipes.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"=edges needs scikit-image. Run pip install scikit-image"):
        chain("edges")


def test_each_root_may_have_its_own_recipe():
    usual = {"control": PLAIN | {"recipe": "blur", "variants": 2}, "swap": {"share": False, "prompts": None}}
    given = ["a", {"path": "b", "control": {"jpeg": 9}}, {"path": "c", "control": None}]
    given += [{"path": "d", "control": {"recipe": ["noise"], "variants": 5}}, {"path": "e", "swap": 0.5}]
    roots = as_roots("root", given, usual)
    assert [root.control and str(root.control) for root in roots] == [
        "blur 1 to 4",
        "jpeg 9",
        None,
        "noise 5 to 50",
        "blur 1 to 4",
    ]
    assert [root.control.variants for root in roots if root.control] == [2, 2, 5, 2]
    assert [root.swap for root in roots] == [0, 0, 0, 0, 0.5]


def test_a_recipe_next_to_condition_images_or_masks_is_refused(photos, pairs):
    with pytest.raises(
        UserError, match=r"data.control: 00 of .* has a condition image of its own. Pass data.control=null"
    ):
        data_of(pairs, "data.control.recipe=jpeg")
    assert data_of(f"[{{path: {pairs}, control: null}},{photos}]", "data.control.recipe=jpeg").training
    Image.new("L", (96, 64), 255).save(photos / "coffee_mask.png")
    with pytest.raises(UserError, match=r"coffee of .* has a mask of its own. Leave it or data.control.mask out"):
        data_of(photos, "data.control.recipe=hole", "data.control.mask=true")


def test_a_target_without_room_for_a_border_is_refused(photos):
    PHOTO.resize((16, 16)).save(photos / "tiny.png")
    with pytest.raises(UserError, match=r"data.control=border: tiny is too small, 16x16 in training"):
        data_of(photos, "data.control.recipe=border")


# The other way round.


def test_swap_trains_from_target_to_control(pairs):
    usual = data_of(pairs).training
    data = data_of(pairs, "data.swap.share=true", "data.swap.prompts=[melt it]")
    for one, other in zip(data.training.samples, usual.samples, strict=True):
        assert (one.target, one.controls) == (other.controls[0], (other.target,))
        assert one.prompts == ("melt it",)


def test_a_share_of_the_samples_is_exchanged_whatever_the_seed(pairs):
    shares = [
        [
            sample.prompts == ("melt",)
            for sample in data_of(pairs, f"data.swap.share={share}", "data.swap.prompts=melt", seed).training.samples
        ]
        for share, seed in ((0.5, "seed=1"), (0.5, "seed=2"), (0.25, "seed=1"), (0, "seed=1"))
    ]
    assert [sum(one) for one in shares] == [4, 4, 2, 0]
    assert shares[0] == shares[1]


def test_each_sample_may_have_its_own_instruction_for_the_way_back(pairs, tmp_path):
    root = shutil.copytree(pairs, tmp_path / "pairs")
    for path in (root / "training_images").glob("*.png"):
        path.with_suffix(".swap.txt").write_text(f"undo {path.stem}")
    data = data_of(root, "data.swap.share=true", "data.swap.prompts=[other]")
    assert [one.prompts for one in data.training.samples] == [(f"undo {one.key}",) for one in data.training.samples]
    assert not any("not read" in note for note in data.notes)
    assert any("*.swap.txt (8)" in note for note in data_of(root).notes), "and it is named where it is not used"
    (beside := tmp_path / "beside").mkdir()
    for path in (root / "training_images").glob("*.png"):
        shutil.copy(path, beside / f"{path.stem}_after.png")
        shutil.copy(root / "control_images" / path.name, beside / f"{path.stem}_before.png")
        (beside / f"{path.stem}_after.txt").write_text("snow")
        (beside / f"{path.stem}.swap.txt").write_text(f"undo {path.stem}")
    data = data_of(beside, "data.swap.share=true", "data.pair_suffixes=[_before,_after]")
    assert [one.prompts for one in data.training.samples] == [(f"undo {one.key}",) for one in data.training.samples]
    assert not any("not read" in note for note in data.notes)
    lines = ["file_name,control_file_name,prompt,swap_prompt"]
    lines += [f"training_images/0{n}.png,control_images/0{n}.png,snow,melt {n}" for n in range(3)]
    (root / "metadata.csv").write_text("\n".join(lines))
    data = data_of(root, "data.swap.share=true")
    assert [one.prompts for one in data.training.samples] == [(f"melt {n}",) for n in range(3)]


def test_a_made_condition_image_is_a_target_the_other_way_round(photos):
    """A model that adds the damage, of the same pixels."""
    usual = batches(data_of(photos, "data.control.recipe={jpeg: 20}"))
    swapped = batches(
        data_of(photos, "data.control.recipe={jpeg: 20}", "data.swap.share=true", "data.swap.prompts=damage")
    )
    for one, other in zip(usual, swapped, strict=True):
        assert (one.target == other.controls[0]).all()
        assert (one.controls[0] == other.target).all()


def test_exchanges_that_cannot_be_are_refused(pairs, photos):
    for root, overrides, words in (
        (
            pairs,
            ["data.swap.share=true"],
            r"0\d of .* has no instruction for the way back. Give it in data.swap.prompts=",
        ),
        (pairs, ["data.swap.share=2"], "data.swap.share=2: must be a number from 0 to 1 or true or false"),
        (pairs, ["data.swap.share=-0.1"], "data.swap.share=-0.1"),
    ):
        with pytest.raises((UserError, InstantiationException), match=words):
            data_of(root, *overrides)
    (photos / "coffee.txt").write_text("a cup")
    for name in ("astronaut", "chelsea", "rocket"):
        (photos / f"{name}.txt").write_text("a photo")
    with pytest.raises(UserError, match="has no condition image to exchange with its target"):
        data_of(f"[{pairs},{{path: {photos}, swap: true}}]", "data.swap.prompts=melt")


def test_a_held_out_pair_is_not_trained_on_the_other_way_round(photos, pairs, tmp_path):
    """Neither where its condition image is made, nor where another root exchanges it."""
    (part := tmp_path / "part").mkdir()
    (part / "coffee.png").symlink_to(photos / "coffee.png")
    swap = "data.swap.share=true", "data.swap.prompts=damage"
    data = data_of(photos, f"data.val_root={part}", "data.control.recipe=jpeg", *swap)
    assert data.training.keys == ["astronaut", "chelsea", "rocket"]
    half = shutil.copytree(pairs, tmp_path / "half", symlinks=True)
    for path in list(half.rglob("*.*")):
        original = pairs / path.relative_to(half)
        path.unlink()
        if path.stem in ("00", "01", "02"):
            path.symlink_to(original)
    both = f"[{pairs},{{path: {pairs}, swap: true}}]"
    data = data_of(both, f"data.val_root=[{{path: {half}, swap: false}}]", "data.swap.prompts=melt")
    assert not any(key.rpartition("/")[2][:2] in ("00", "01", "02") for key in data.training.keys)
    assert len(data.training.keys) == 10


def test_masks_stay_with_their_pair_when_it_is_exchanged(pairs, tmp_path):
    root = shutil.copytree(pairs, tmp_path / "pairs")
    for path in (root / "training_images").glob("*.png"):
        image = Image.open(path).convert("RGBA")
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(path)
    swap = "data.swap.share=0.5", "data.swap.prompts=melt", "data.alpha_mask=true"
    for one in batches(scanned(f"data.root={root}", *swap)):
        assert one.mask.unique().numel() > 8


def test_captions_that_are_empty_are_none(photos, pairs, tmp_path):
    (photos / "coffee.txt").write_text("")
    with pytest.raises(UserError, match=r"has no caption, which data\.control\.prompts"):
        data_of(photos, "data.control.recipe=jpeg", "data.control.prompts=['fix [caption]']")
    root = shutil.copytree(pairs, tmp_path / "pairs")
    (root / "training_images" / "00.swap.txt").write_text("\n")
    data = data_of(root, "data.swap.share=true", "data.swap.prompts=melt")
    assert {one.prompts for one in data.training.samples} == {("melt",)}


def test_an_instance_prompt_is_the_instruction_of_captioned_images(photos):
    data = data_of(
        photos,
        "data=captions",
        "data.cache_dir=null",
        "data.source.instance_prompt=a photo",
        "data.control.recipe=jpeg",
    )
    assert {one.prompts for one in data.training.samples} == {("a photo",)}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("share", [0.001, 0.85])
def test_holes_of_any_allowed_share_are_drawn(seed, share):
    mask = hole_mask((16, 24), share, np.random.default_rng(seed))
    assert np.asarray(mask).mean() / 255 == pytest.approx(share, abs=0.12)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            ("JPEG", "jpeg"),
            ("canny", "edges"),
            ("inpaint", "hole"),
            ("colorize", "grey"),
            ("Super-Resolution", "downscale"),
        ),
        *(("outpainting", "border"), ("OpenPose", "pose"), ("watermark", "text"), ("depth-anything", "depth")),
    ],
)
def test_other_programs_names_of_recipes_get_ours(name, meant):
    with pytest.raises(UserError, match=f"there is no such recipe. Did you mean {meant}?"):
        as_chain("data.control", **{**PLAIN, "recipe": name})
