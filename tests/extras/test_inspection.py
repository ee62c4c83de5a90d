"""Measurements on images that find faults in pairs."""

from dataclasses import replace

import imagehash
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from datamodules.images.alignment import align
from datamodules.images.captions import wrapped_line
from datamodules.images.samples import Sample
from extras.inspection import Kind, Print, inspect_sample, look, matches, nearly_equal, repeated
from tests.support.combinations import first
from tests.support.faults import EDITS, PHOTOGRAPHS, moved, noisy, picture, recompressed, with_a_small_change

BESIDE = {
    "as it is": lambda image: image,
    "inverted": ImageOps.invert,
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    "other colours": lambda image: Image.merge("RGB", image.split()[::-1]),
    "compressed": lambda image: recompressed(image, 60),
}


@pytest.mark.parametrize(
    ("captions", "wrapped"),
    [
        (("A mountain in the snow, seen from", "the valley below at dawn."), "A mountain in the snow, seen from"),
        (("a long winter,", "and a short one"), "a long winter,"),
        (("make it snow", "let it snow"), None),
        (("Make it snow", "Let it snow"), None),
        (("Make it snow.", "let it snow."), None),
        (("one",), None),
        (("", "a"), None),
    ],
)
def test_lines_that_are_parts_of_a_sentence_are_found(captions, wrapped):
    assert wrapped_line(captions) == wrapped


def gray(image):
    return np.asarray(image.convert("L"), np.float32)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.sampled_from(("astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "moon")),
    st.sampled_from(sorted(BESIDE)),
    st.integers(-45, 45),
    st.integers(-45, 45),
)
def test_a_shift_is_found_despite_other_edits(photo, edit, x, y):
    control, target = moved(picture(photo), x, y)
    found = align(gray(control), gray(BESIDE[edit](target)))
    assert found is not None
    assert (found.x, found.y) == (pytest.approx(x, abs=0.5), pytest.approx(y, abs=0.5))
    assert found.scale == pytest.approx(1, abs=0.003)


@pytest.mark.parametrize("photo", first(1, ["astronaut", "page"]))
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_no_fault(photo, edit, tmp_path):
    for name, image in zip(("control", "target"), EDITS[edit](picture(photo)), strict=True):
        image.save(tmp_path / f"{name}.png")
    sample = Sample("one", tmp_path / "target.png", (tmp_path / "control.png",), ("edit it",))
    assert inspect_sample(sample, (512,)).findings == []


@pytest.mark.parametrize("photo", ["astronaut", "page"])
def test_compression_is_no_edit_and_the_smallest_edit_is_one(photo):
    image = picture(photo)
    assert nearly_equal(image, image)
    assert nearly_equal(image, recompressed(image, 90))
    assert nearly_equal(image, recompressed(image, 80))
    assert not nearly_equal(image, with_a_small_change(image))
    assert not nearly_equal(image, recompressed(with_a_small_change(image), 90))
    assert not nearly_equal(image, ImageEnhance.Brightness(image).enhance(1.1))
    assert not nearly_equal(image.filter(ImageFilter.GaussianBlur(1)), image)


@pytest.mark.slow
def test_fine_detail_of_a_large_image_is_an_edit(tmp_path):
    """A sharp image of 2400 pixels equals a blurred one in the small copies."""
    large = noisy(picture("gravel").resize((2400, 1800), Image.Resampling.BICUBIC)).convert("L").convert("RGB")
    large.save(tmp_path / "target.png")
    large.filter(ImageFilter.GaussianBlur(0.8)).save(tmp_path / "blurred.png")
    recompressed(large, 90).save(tmp_path / "compressed.png")
    sample = Sample("one", tmp_path / "target.png", (tmp_path / "blurred.png",), ("sharpen it",))
    assert nearly_equal(look(sample.controls[0]).small, look(sample.target).small)
    assert inspect_sample(sample, ()).findings == []
    compressed = Sample("one", tmp_path / "target.png", (tmp_path / "compressed.png",), ("sharpen it",))
    assert [finding.kind for finding in inspect_sample(compressed, ()).findings] == [Kind.NEARLY_EQUAL]


def test_an_image_may_have_any_size(tmp_path):
    for name, size in (("long", (4000, 16)), ("least", (16, 16)), ("high", (17, 900))):
        picture("coffee").resize(size).save(tmp_path / "target.png")
        ImageOps.mirror(picture("coffee").resize(size)).save(tmp_path / "control.png")
        sample = Sample(name, tmp_path / "target.png", (tmp_path / "control.png",), ("mirror it",))
        assert inspect_sample(sample, ()).findings == []
        same = Sample(name, tmp_path / "target.png", (tmp_path / "target.png",), ("leave it",))
        assert [finding.kind for finding in inspect_sample(same, ()).findings] == [Kind.EQUAL]


def test_each_of_several_controls_is_inspected(tmp_path):
    """Cases: a style image of other proportions first, a control equal to the target, a missing control."""
    image = picture("coffee")
    for name, one in (("style", picture("rocket").resize((300, 400))), ("control", image), ("target", image)):
        one.save(tmp_path / f"{name}.png")
    moved(image, 8, 0)[0].save(tmp_path / "still.png")
    moved(image, 8, 0)[1].save(tmp_path / "moved.png")
    (tmp_path / "lost.png").write_bytes(b"nothing")

    def found(target, *controls):
        paths = tuple(tmp_path / f"{name}.png" for name in controls)
        sample = Sample("one", tmp_path / f"{target}.png", paths, ("edit it",))
        return [(finding.kind, finding.figure) for finding in inspect_sample(sample, ()).findings]

    assert found("target") == []
    assert found("moved", "style", "still") == [(Kind.SHIFTED, "8 px right (1.6 %)")]
    assert found("target", "style", "control") == [(Kind.EQUAL, "control 2")]
    assert found("target", "style") == [(Kind.PROPORTION, "control 300x400, target 512x384")]
    assert found("target", "lost", "style") == [
        (Kind.UNREADABLE, "cannot read the image lost.png: it is empty or no image")
    ]


@pytest.mark.parametrize("size", [(15, 4), (1, 1)])
def test_a_mask_may_be_of_any_size(tmp_path, size):
    paths = [tmp_path / f"{name}.png" for name in ("target", "control", "mask")]
    width, height = max(size), min(size)
    for path, photo in zip(paths[:2], ("coffee", "brick"), strict=True):
        picture(photo).resize((32 * width // height, 32)).save(path)
    mask = Image.linear_gradient("L").resize(size)
    mask.save(paths[2])
    found = inspect_sample(Sample("a", paths[0], (paths[1],), ("x",), mask=paths[2]), ()).findings
    kinds = [finding.kind for finding in found if finding.kind in (Kind.UNREADABLE, Kind.MASK)]
    assert kinds == ([Kind.MASK] if size == (1, 1) else [])


@pytest.mark.parametrize("photo", PHOTOGRAPHS)
def test_a_print_has_the_bits_of_imagehash(photo):
    for image in (picture(photo), recompressed(picture(photo), 30), picture(photo).crop((50, 0, 300, 384))):
        assert Print.of(image).hash == int(str(imagehash.phash(image)), 16)


def test_copies_are_near_and_other_images_are_not():
    originals = [picture(photo) for photo in PHOTOGRAPHS]
    prints = [Print.of(image) for image in originals]
    assert list(matches(prints, prints)) == []
    copies = [Print.of(recompressed(image, 60).resize((300, 225))) for image in originals]
    assert [(one, other) for one, other, _ in matches(copies, prints)] == [(n, n) for n in range(len(originals))]
    orange, blue = (
        [Print.of(ImageOps.colorize(image.convert("L"), "black", colour)) for image in originals]
        for colour in ("orange", "deepskyblue")
    )
    assert max((one.hash ^ other.hash).bit_count() for one, other in zip(orange, blue, strict=True)) <= 4
    assert list(matches(orange, blue)) == []


def test_a_held_out_control_that_is_learned_is_a_leak(tmp_path):
    """Another file of the same image is a leak; one file with several edits is normal."""
    controls = [Print.of(picture("coffee")), Print.of(recompressed(picture("coffee"), 90))]
    targets = [Print.of(picture("rocket")), Print.of(picture("astronaut"))]
    one = Sample("one", tmp_path / "1.png", (tmp_path / "a.png",), ("fly",))
    two = Sample("two", tmp_path / "2.png", (tmp_path / "b.png",), ("smile",))
    [leak] = repeated([one, two], targets, controls, held={1})
    assert (leak.kind, leak.key, leak.figure) == (Kind.LEAK, "two", "control as one")
    assert repeated([one, two], targets, controls, held=set()) == []
    same_file = Sample("two", tmp_path / "2.png", one.controls, ("smile",))
    assert repeated([one, same_file], targets, controls, held={1}) == []
    another_instruction = Sample("two", one.target, one.controls, ("lift off",))
    assert repeated([one, another_instruction], targets[:1] * 2, controls[:1] * 2, held=set()) == []


def test_two_small_edits_of_one_control_are_no_duplicates(tmp_path):
    flat = np.full((8, 8, 3), 128, np.int16)
    one_more = flat.copy()
    one_more[3, 3] += 3
    targets = [Print(1, flat), Print(1, one_more), Print(1, flat)]
    control, another = Print(2**40 - 1, flat), Print(2**20 - 1, flat)
    names = ("a", "b", "c")
    samples = [Sample(name, tmp_path / f"{name}.png", (tmp_path / f"{name}_0.png",), (name,)) for name in names]

    def found(controls):
        return [(one.kind, one.key, one.figure) for one in repeated(samples, targets, controls, held=set())]

    # The last target is the first once more; the second is only much like it.
    assert found([control, control, control]) == [(Kind.DUPLICATE, "c", "as a")]
    assert found([control, another, control]) == [(Kind.DUPLICATE, "b", "as a"), (Kind.DUPLICATE, "c", "as a")]


def test_an_empty_caption_is_a_fault(tmp_path):
    picture("coffee").save(tmp_path / "a.png")
    samples = [Sample("a", tmp_path / "a.png", (), (prompt,)) for prompt in ("make it snow", " ")]
    assert [[one.kind for one in inspect_sample(each, ()).findings] for each in samples] == [[], [Kind.NO_CAPTION]]
    reply = replace(samples[0], prompts=("I'm sorry, I can't do that",))
    assert [one.kind for one in inspect_sample(reply, ()).findings] == [Kind.REPLY]
