"""The part of an image that training uses, and its size."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from datamodules.edits import EditsDataModule
from datamodules.images.decoding import Facts, floor_size, shrunk
from datamodules.images.resizing import MOST_CROPPED, Framing, bucket_table, notes_on
from datamodules.images.samples import Root, Sample
from datamodules.images.windows import ConditionImages, load_image, load_mask
from foundation.errors import UserError
from tasks.models import without_network
from tests.support.commands import compose

MEGAPIXEL = 1024**2
SIDES = st.integers(16, 6000)


def framing(buckets="aspect", **more):
    return Framing(**{"upscale": False, "crop": "center", "crop_count": 4, "flip": False, **more, "buckets": buckets})


def views(frame, *sizes, root=None, **more):
    sample = Sample("a", "a.png", tuple("bcd"[: len(sizes) - 1]), ("",))
    return frame.views(sample, root or Root("", resolution=(1024,)), sizes, **more)


@pytest.mark.parametrize("multiple", [16, 32])
@pytest.mark.parametrize("side", [512, 1024, 1328])
def test_buckets_are_multiples_of_about_the_area_and_close_together(side, multiple):
    table = bucket_table(side**2, multiple)
    assert all(width % multiple == height % multiple == 0 for width, height in table)
    assert all(abs(math.log(width * height / side**2)) < 2 * multiple / side for width, height in table)
    assert {(height, width) for width, height in table} == set(table)
    proportions = [width / height for width, height in table]
    assert proportions == sorted(proportions)
    gaps = [wider / narrower for narrower, wider in itertools.pairwise(proportions)]
    assert max(gaps) < 1.16
    assert any(width == height for width, height in table)


@settings(max_examples=100)
@example(251, 839, 512, 32)  # a hair too much, by the rounding of its sides
@given(SIDES, SIDES, st.sampled_from([64, 512, 1024]), st.sampled_from([16, 32]))
def test_an_image_is_cropped_by_a_few_percent_and_never_enlarged(width, height, side, multiple):
    frame = framing(multiple=multiple)
    [view] = views(frame, (width, height), root=Root("", resolution=(side,)))
    [window] = view.windows
    left, top, right, bottom = window.box
    assert 0 <= left < right <= window.frame[0]
    assert 0 <= top < bottom <= window.frame[1]
    assert window.size == (right - left, bottom - top)
    assert window.cropped <= MOST_CROPPED + 1e-9
    assert window.frame[0] <= max(width, 16)
    assert window.frame[1] <= max(height, 16)
    assert window.size[0] * window.size[1] <= 1.5 * side**2
    if window.cropped:  # its proportions are kept, to half a pixel
        assert abs(window.frame[0] / width - window.frame[1] / height) <= 0.51 / min(width, height) + 1e-9
    [exact] = views(framing("exact"), (width, height), root=Root("", resolution=(side,)))
    assert exact.windows[0].size == floor_size(*shrunk(width, height, side**2))


MODELS = {
    "kontext": ConditionImages(),
    "flux2": ConditionImages(most_area=MEGAPIXEL, crops=True),
    "flux3": ConditionImages(10, most_area=MEGAPIXEL, crops=True, whole_area=2048**2),
    "krea2_edit": ConditionImages(most_area=MEGAPIXEL, condition_image_size=384**2),
    "qwen": ConditionImages(1, 1, MEGAPIXEL, 384**2),
}


@settings(max_examples=300)
@example("flux2", 3660, 1937, 1024, 1)
@given(st.sampled_from(list(MODELS)), SIDES, SIDES, st.sampled_from([512, 1024]), st.integers(1, 2))
def test_training_sees_an_image_at_the_size_of_prediction(model, width, height, side, count):
    """The images of one view: the target has the size of the result that the pipeline makes of its control."""
    images = MODELS[model]
    [view] = views(
        framing("exact", condition_images=images), *[(width, height)] * (1 + count), root=Root("", resolution=(side,))
    )
    seen = images.of_count(count).window(width, height, side**2)
    assert view.windows == (seen,) * (1 + count)
    if (model, width, height) == ("flux2", 3660, 1937):
        assert seen.size == (1392, 736)


@pytest.mark.parametrize("model", ["kontext", "flux2", "krea2_edit", "flux3"])
def test_target_that_extends_its_control_to_one_side_has_the_same_scale(model, tmp_path):
    """An outpaint: shrinking the target alone would teach a zoom."""
    images = MODELS[model]
    sizes = ((256, 128), (128, 128)), ((2000, 3000), (2000, 1500)), ((2048, 1024), (1024, 1024))
    for buckets, (wide, control) in itertools.product(("exact", "aspect"), sizes):
        frame = framing(buckets, condition_images=images)
        [view] = views(frame, wide, control, root=Root("", resolution=(128,)))
        target, seen = view.windows
        pairs = (*zip(target.frame, wide, strict=True), *zip(seen.frame, control, strict=True))
        scales = [side / own for side, own in pairs]
        assert max(scales) / min(scales) < 1 + 16 / min(seen.size)  # within a token
    if model == "kontext":
        [view] = views(
            framing("exact", condition_images=images), (256, 128), (128, 128), root=Root("", resolution=(128,))
        )
        assert [window.size for window in view.windows] == [(176, 80), (80, 80)]
    Image.new("RGB", (1605, 1605)).save(tmp_path / "x.png")
    for height, width in ((1600, 3200), (3200, 1600), (3200, 3200), (1600, 1600), (1616, 1920), (1600, 800)):
        edits = EditsDataModule(str(tmp_path / "x.png"), "x", None, None, [0], [1.0], height, width, MEGAPIXEL, 1)
        edits.condition_images = images
        windows, size = edits._windows((tmp_path / "x.png",))
        assert size == (width, height)
        whole = {"kontext": 1600, "flux3": 1605}.get(model) if width >= 1600 else None
        assert windows[0].frame == ((whole, whole) if whole else images.window(1605, 1605, MEGAPIXEL).frame)


def test_other_extensions_are_noted_with_their_zoom():
    root, facts = Root("", resolution=(128,)), [[Facts(*size, False, False, "") for size in ((300, 160), (128, 128))]]
    seen = views(framing("exact"), (300, 160), (128, 128), root=root)
    notes = notes_on(seen, facts, [root], framing("exact"), "pairs")
    assert re.match(r"1 pair has control and target of different sizes, .* by up to 1\.94 times", notes[-1])


@given(SIDES, SIDES, st.sampled_from([256, 1024]))
def test_enlarged_images_reach_the_resolution(width, height, side):
    assume(max(width, height) <= 3 * min(width, height))
    for buckets in ("exact", "aspect"):
        [view] = views(framing(buckets, upscale=True), (width, height), root=Root("", resolution=(side,)))
        assert math.prod(view.windows[0].size) > 0.8 * side**2


def test_without_a_resolution_images_keep_their_sizes():
    for buckets in ("exact", "aspect"):
        [view] = views(framing(buckets), (1000, 750), (40, 40), root=Root(""))
        assert [window.size for window in view.windows] == [floor_size(1000, 750), (32, 32)]
        assert not view.cropped


def test_views_are_all_combinations_and_the_first_is_the_largest_plain_one():
    frame = framing(crop="random_cached", crop_count=3, flip=True)
    found = views(frame, (4000, 2900), (2000, 1450), root=Root("", resolution=(512, 1024), weight=0.5, repeats=2))
    assert len(found) == len(set(found)) == 12
    assert all(view.windows[0] == view.windows[1] for view in found)
    assert {(view.weight, view.repeats) for view in found} == {(0.5, 2)}
    first = found[0].windows[0]
    assert math.prod(first.size) > 0.9 * MEGAPIXEL
    assert not first.flipped
    left, top, right, bottom = first.box
    assert abs(left - (first.frame[0] - right)) <= 1
    assert abs(top - (first.frame[1] - bottom)) <= 1
    [held_out] = views(
        frame, (4000, 2900), (2000, 1450), root=Root("", resolution=(512, 1024), weight=0.5), held_out=True
    )
    assert (held_out.windows, held_out.weight, held_out.repeats) == (found[0].windows, 1, 1)


def test_crops_that_are_equal_are_one_view_that_comes_as_often():
    frame = framing(crop="random_cached", crop_count=4, flip=True)
    [plain, mirrored] = views(frame, (2000, 2000), root=Root("", resolution=(1024,), repeats=3))
    assert [plain.repeats, mirrored.repeats] == [12, 12]
    assert sum(view.repeats for view in views(frame, (3000, 2000))) == 8


def test_a_reference_of_other_proportions_gets_a_bucket_of_its_own():
    [view] = views(framing(), (4000, 3000), (4000, 3010), (600, 900))
    target, same, reference = view.windows
    assert same == target
    assert reference.size[0] < reference.size[1]
    assert math.prod(reference.size) <= 600 * 900


@pytest.mark.parametrize(("model", "multiple", "sides"), [("flux2", 16, (512, 768, 1024)), ("qwen", 32, (1024,))])
def test_references_agree_with_their_targets_in_every_bucket(model, multiple, sides):
    """A control that is shrunk alone would teach a little zoom with the edit."""
    images = MODELS[model]
    frame = framing(multiple=multiple, condition_images=images)
    for side in sides:
        for proportion in np.geomspace(1 / 3, 3, 67):
            own = round(3000 * proportion**0.5), round(3000 / proportion**0.5)
            [view] = views(frame, own, own, root=Root("", resolution=(side,)))
            assert view.windows[0] == view.windows[1]
        assert all(images.size(*one) == one for one in bucket_table(side**2, multiple, images))


# An image, a target, the size of the whole image in it, and of the part that is seen: Krea 2's Identity Edit nodes.
FITTED = [
    ((800, 600), (1024, 768), (1024, 768), (1024, 768)),
    ((1000, 710), (1024, 768), (1082, 768), (1024, 768)),  # cropped, as little is lost
    ((600, 800), (1024, 768), (576, 768), (576, 768)),
    ((2000, 510), (1024, 768), (1024, 261), (1024, 256)),
    ((3000, 20), (64, 64), (64, 16), (64, 16)),
]


@pytest.mark.parametrize(("own", "target", "frame", "seen"), FITTED)
def test_references_fit_into_the_target_in_training_and_prediction(own, target, frame, seen, tmp_path):
    images = ConditionImages(most_area=MEGAPIXEL, fits_target=True)
    window = images.fitted(own, target)
    assert (window.frame, window.size, window.seen) == (frame, seen, seen)
    [view] = views(framing("exact", condition_images=images), target, own)
    assert view.windows[1].size == seen
    Image.new("RGB", own).save(tmp_path / "photo.png")
    edits = EditsDataModule(str(tmp_path / "photo.png"), "x", None, None, [0], [1.0], *target[::-1], MEGAPIXEL, 1)
    edits.condition_images = images
    assert edits.request(edits.edits[0]).raw.controls[0].shape == (1, 3, *seen[::-1])


EDITING = (
    "flux_kontext",
    "flux2_klein_4b",
    "flux3_klein",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "longcat_image_edit",
)
KREA2 = ("krea2_edit", "krea2_edit model.edit_scheme=before")


@pytest.mark.parametrize("model", [*EDITING, *KREA2])
def test_no_family_learns_or_sees_a_zoom(model, tmp_path):
    """The target and the control show the same view, on the same grid of latent pixels, in training and prediction."""
    module = without_network(compose("train", *f"model={model}".split()).model)
    images, multiple = module.condition_images, module.geometry.side_multiple
    photographs = (3000, 2000), (600, 800), (1231, 917)
    for own, buckets, side in itertools.product(photographs, ("exact", "aspect"), (512, 1024)):
        sizes = own, (own[0] + 3, own[1] - 2), (own[0] - 2, own[1] + 1)  # controls that are cropped by hand
        frame = framing(buckets, multiple=multiple, condition_images=images)
        [view] = views(frame, *sizes[: (images.most or 2) + 1], root=Root("", resolution=(side,)))
        target, *controls = view.windows
        for control in controls:
            assert control.size == target.size
            for edge in range(4):
                seen = [
                    window.box[edge] / window.frame[edge % 2] * target.size[edge % 2] for window in (target, control)
                ]
                assert abs(seen[0] - seen[1]) < 8
    Image.new("RGB", own).save(tmp_path / "photo.png")
    edits = EditsDataModule(str(tmp_path / "photo.png"), "x", None, None, [0], [1.0], None, None, MEGAPIXEL, 1)
    edits.configure_for(module)
    request = edits.request(edits.edits[0])
    assert request.size == tuple(request.raw.controls[0].shape[:1:-1]), "prediction"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": "sideways"}, "data.buckets=sideways: choose auto, exact or aspect"),
        ({"crop": "random"}, "data.crop=random: choose center or random_cached"),
        ({"buckets": "exact", "crop": "random_cached"}, "data.crop=random_cached needs data.buckets=aspect: exact"),
    ],
)
def test_wrong_words_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        framing(**settings)


def marked(path, size, spot, grow):
    """Draw a grey image with a white spot, at a share of its sides from left and top; `grow` stretches everything."""
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    distance = np.hypot(columns / width - spot[0], (rows / height - spot[1]) * height / width)
    picture = np.where(distance < 0.03, 255, 60).astype(np.uint8)
    Image.fromarray(picture).convert("RGB").resize((width * grow, height * grow), Image.Resampling.BICUBIC).save(path)
    return width * grow, height * grow


def center(pixels):
    """Return the position of the spot, (x, y) in pixels."""
    bright = np.clip(pixels.mean(0).numpy() - pixels.min().item() - 0.2 * np.ptp(pixels.numpy()), 0, None)
    rows, columns = np.mgrid[0 : bright.shape[0], 0 : bright.shape[1]]
    return (columns * bright).sum() / bright.sum(), (rows * bright).sum() / bright.sum()


@settings(max_examples=20)
@given(
    st.integers(130, 420),
    st.integers(130, 420),
    st.sampled_from([16, 32]),
    st.sampled_from([(1, 1, 1), (1, 3, 1), (2, 1, 1), (1, 2, 3)]),
    st.sampled_from(["exact", "aspect"]),
    st.booleans(),
    st.integers(0, 23),
)
def test_target_control_and_mask_agree_to_the_pixel(
    tmp_path_factory, width, height, multiple, grown, buckets, upscale, which
):
    """Sizes are arbitrary; every crop is tested, mirrored or not."""
    folder = tmp_path_factory.mktemp("marked")
    paths = [folder / f"{name}.png" for name in ("target", "control", "mask")]
    spot = (0.4, 0.45)
    sizes = [marked(path, (width, height), spot, grow) for path, grow in zip(paths, grown, strict=True)]
    crop = {} if buckets == "exact" else {"crop": "random_cached"}
    frame = framing(buckets, multiple=multiple, upscale=upscale, flip=True, **crop)
    sample = Sample(f"a{which}", paths[0], (paths[1],), ("",), paths[2])
    found = frame.views(sample, Root("", resolution=(256, 128)), sizes[:2])
    view = found[which % len(found)]
    target, (control,) = load_image(paths[0], view.windows[0]), [load_image(paths[1], view.windows[1])]
    mask = load_mask(paths[2], view.windows[0])
    assert mask.shape[1:] == target.shape[1:]
    scale = [own / seen for own, seen in zip(target.shape[1:], control.shape[1:], strict=True)]
    if buckets == "aspect":
        assert target.shape == control.shape
    places = [center(target), center(mask)]
    x, y = center(control)
    places.append((x * scale[1], y * scale[0]))
    for place in places[1:]:
        assert np.hypot(place[0] - places[0][0], place[1] - places[0][1]) < 1
    # And the spot is where the window says.
    window = view.windows[0]
    expected = spot[0] * window.frame[0] - window.box[0]
    expected = window.size[0] - expected if window.flipped else expected
    assert abs(places[0][0] + 0.5 - expected) < 1.5
