"""Pairs in one folder, by how their names end."""

import pytest

from datamodules.errors import UserError
from datamodules.images.folders import USUAL_ENDINGS
from datamodules.images.samples import Root
from datamodules.images.sources import find_samples
from tests.support.stored import picture


def make(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(picture(0) if not name.endswith((".txt", ".json")) else b"make it snow")
    return folder


@pytest.mark.parametrize("ends", USUAL_ENDINGS)
@pytest.mark.parametrize("caption", ["a b{}.txt", "a b.txt"])
def test_usual_endings(tmp_path, ends, caption):
    control, target = ends
    root = make(tmp_path / "x", f"a b{control}.jpg", f"a b{target}.png", caption.format(target))
    [sample] = find_samples([Root(root)]).samples
    assert sample.key == "a b"
    assert sample.controls == (root / f"a b{control}.jpg",)
    assert sample.target == root / f"a b{target}.png"
    assert sample.prompts == ("make it snow",)


def test_endings_of_ones_own(tmp_path):
    root = make(tmp_path / "x", "a-raw.png", "a-done.png", "a.txt", "b_start.png", "b_end.png")
    [sample] = find_samples([Root(root, pair_suffixes=("-raw", "-done"))]).samples
    assert (sample.controls[0].name, sample.target.name) == ("a-raw.png", "a-done.png")
    with pytest.raises(UserError, match="no pairs named X-in and X-out among its images"):
        find_samples([Root(root, pair_suffixes=("-in", "-out"))])


def test_endings_in_doubt_are_not_guessed(tmp_path):
    root = make(tmp_path / "x", "a_start.png", "a_end.png", "a.txt", "b_before.png", "b_after.png", "b.txt")
    with pytest.raises(UserError, match="X_start, X_end and X_before, X_after: say which, as data") as error:
        find_samples([Root(root)])
    assert "\n" not in str(error.value)
    root = make(tmp_path / "y", "a_source.png", "a_control.png", "a_target.png", "a.txt")
    with pytest.raises(UserError, match="X_control, X_target and X_source, X_target"):
        find_samples([Root(root)])


def test_masks_and_different_numbers_of_references(tmp_path):
    names = ["a_control.png", "a_target.png", "a.txt", "a_control_2.jpg", "a_control_1.png", "a_mask.png"]
    root = make(tmp_path / "x", *names, "a_b_control.png", "a_b_target.png", "a_b.txt")
    found = find_samples([Root(root)])
    assert found.incomplete == []
    one, two = sorted(found.samples, key=lambda sample: sample.key)
    assert [path.name for path in one.controls] == ["a_control.png", "a_control_1.png", "a_control_2.jpg"]
    assert one.mask == root / "a_mask.png"
    assert (len(two.controls), two.mask) == (1, None)


def test_what_is_no_whole_pair_is_incomplete(tmp_path):
    names = ["a_start.png", "a_end.png", "a.txt", "b_start.png", "b.txt", "c_end.png", "d_start.png", "d_end.png"]
    names += ["e_start.png", "e_end.png", "e.txt", "e_end.txt", "other.png", "f_start.png", "f_end.heic", "g_end.gif"]
    root = make(tmp_path / "x", *names, "Thumbs.db", "._a_start.png")
    (root / "e.txt").write_text("make it rain")
    found = find_samples([Root(root)])
    assert [sample.key for sample in found.samples] == ["a"]
    assert found.passed_over == 2
    assert [line.replace(f"{root}/", "").partition(" is none of .")[0] for line in found.incomplete] == [
        "c_end.png has no control image c_start.*",
        "d_end.png has no caption d.txt",
        "e.txt and e_end.txt hold different captions of one image. Keep one",
        "b_start.png has no target image b_end.*",
        "f_start.png has no target image f_end.*: f_end.heic",
        "other.png has no target image other_end.*",
    ]


def test_pictures_that_are_no_pairs_are_as_before(tmp_path):
    with pytest.raises(UserError, match="images, but no condition images"):
        find_samples([Root(make(tmp_path / "x", "weekend.png", "kick_start.png", "a.png", "a.txt"))])


def test_a_pair_named_by_its_endings_alone_has_no_caption_of_its_folder(tmp_path):
    (tmp_path / "x.txt").write_text("about the folder")
    root = make(tmp_path / "x", "_start.png", "_end.png", "a_start.png", "a_end.png", "a.txt")
    for require_prompt in (True, False):
        found = find_samples([Root(root, require_prompt=require_prompt)])
        assert [sample.key for sample in found.samples] == ["a"]
        assert [line.partition(" has no target image ")[0] for line in found.incomplete] == [
            f"{root}/_end.png",
            f"{root}/_start.png",
        ]


@pytest.mark.parametrize("ends", [("", "_after"), ("_before", "")])
def test_one_ending_may_be_empty(tmp_path, ends):
    control, target = ends
    names = [f"{name}{end}.png" for name in ("x", "y b") for end in ends]
    more = ["x_mask.png", "x_control_1.jpg", f"z{control}.png", f"w{target}.png", "notes.md", f"v{control}.png"]
    root = make(tmp_path / "x", *names, *more, "x.txt", "y b.txt", f"v{target}.heic")
    found = find_samples([Root(root, pair_suffixes=ends)])
    assert [(one.key, one.target.name, one.controls[0].name) for one in found.samples] == [
        ("x", f"x{target}.png", f"x{control}.png"),
        ("y b", f"y b{target}.png", f"y b{control}.png"),
    ]
    assert [one.name for one in found.samples[0].controls] == [f"x{control}.png", "x_control_1.jpg"]
    assert found.samples[0].mask == root / "x_mask.png"
    assert [line.replace(f"{root}/", "").partition(" is none of .")[0] for line in found.incomplete] == [
        f"w{target}.png has no control image w{control}.*",
        f"v{control}.png has no target image v{target}.*: v{target}.heic",
        f"z{control}.png has no target image z{target}.*",
    ]


@pytest.mark.parametrize("name", ["archive.tar", "x.parquet", "data/x.parquet"])
def test_pairs_beside_another_data_set_are_not_guessed(tmp_path, name):
    root = make(tmp_path / "x", "a_start.png", "a_end.png", "a.txt")
    (root / "data").mkdir()
    (root / name).write_bytes(b"x")
    with pytest.raises(UserError, match=f"pairs named X_start, X_end, and {root / name}: move one .* or set") as error:
        find_samples([Root(root)])
    assert "data.pair_suffixes=[_start,_end]" in str(error.value)
    assert "\n" not in str(error.value)
    assert [one.key for one in find_samples([Root(root, pair_suffixes=("_start", "_end"))]).samples] == ["a"]
