"""Pictures with captions, and how they reach a model that makes pictures from text."""

import shutil

import pytest
from omegaconf import OmegaConf

from datamodules.errors import UserError
from datamodules.images.samples import Root, as_roots
from datamodules.images.sources import find_captioned
from tests.support.pictures import make_pairs, photograph


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.jpg", "c.webp", "c_mask.png"):
        photograph("coffee", 32, 32).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("\ufeffa cup of coffee \n", encoding="utf-8")
    return tmp_path


def test_caption_is_the_text_beside_or_empty(folder):
    found = find_captioned([Root(folder)], None)
    assert [(sample.key, sample.prompts[0]) for sample in found.samples] == [
        ("a", "a cup of coffee"),
        ("b", ""),
        ("c", ""),
    ]
    assert all(sample.controls == () for sample in found.samples)
    assert found.incomplete == []


def test_instance_prompt_stands_for_the_captions_that_are_missing(folder):
    found = find_captioned([Root(folder)], "a photo of sks cup")
    assert [sample.prompts[0] for sample in found.samples] == [
        "a cup of coffee",
        "a photo of sks cup",
        "a photo of sks cup",
    ]


def test_mask_belongs_to_its_picture(folder):
    masks = {sample.key: sample.mask for sample in find_captioned([Root(folder)], None).samples}
    assert masks == {"a": None, "b": None, "c": folder / "c_mask.png"}


def test_text_of_a_picture_in_another_format_is_said_and_other_text_is_not(folder):
    (folder / "README.txt").write_text("about these pictures")
    assert find_captioned([Root(folder)], None).incomplete == []
    (folder / "d.txt").write_text("a cup")
    (folder / "d.heic").write_bytes(b"")
    [line] = find_captioned([Root(folder)], None).incomplete
    assert line.startswith(f"{folder / 'd.heic'} is none of .bmp, .jpeg")
    assert line.endswith("but has a caption")


def test_pictures_below_belong_to_it_but_not_hidden_ones(folder):
    for name in ("more/deep", ".thumbnails"):
        (folder / name).mkdir(parents=True)
        photograph("coffee", 32, 32).save(folder / name / "a.png")
    (folder / "more" / "deep" / "a.txt").write_text("another cup")
    found = find_captioned([Root(folder)], None).samples
    assert [(s.key, s.prompts[0]) for s in found if "/" in s.key] == [("more/deep/a", "another cup")]
    assert len(found) == 4


def test_folders_that_are_links_are_read_once(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    photograph("rocket", 32, 32).save(other / "d.png")
    (other / "back").symlink_to(folder)
    (folder / "linked").symlink_to(other)
    assert [sample.key for sample in find_captioned([Root(folder)], None).samples] == ["a", "b", "c", "linked/d"]


def test_folders_of_kohya_are_told_how_to_repeat(folder):
    for name in ("10_sks dog", "2024_holiday", "001_scene"):
        shutil.copytree(folder, folder.parent / "set" / name)
    root = folder.parent / "set"
    [note] = find_captioned([Root(root)], None).notes
    roots = f'[{{path: "{root}/10_sks dog", repeats: 10}}]'
    assert note == f"the names of kohya's folders repeat nothing here; this does: data.root='{roots}'"
    [told] = as_roots("root", OmegaConf.to_container(OmegaConf.create(f"root: {roots}"))["root"], {})
    assert (told.path, told.repeats) == (f"{root}/10_sks dog", 10)
    assert find_captioned([told], None).notes == ()


def test_folder_without_captions_beside_others_and_other_files_are_said(folder):
    for name in ("a.png", "b.png"):
        (folder / "depth").mkdir(exist_ok=True)
        shutil.copy(folder / "a.png", folder / "depth" / name)
    (folder / "b.tags").write_text("cup")
    assert find_captioned([Root(folder)], None).notes == (
        f"no image has a caption in {folder}/depth (2)",
        f"{folder}: not read, though named like images that are: *.tags (1)",
    )


def test_keys_of_several_roots_differ(folder):
    second = shutil.copytree(folder, folder.with_name("second"))
    assert len({sample.key for sample in find_captioned([Root(folder), Root(second)], None).samples}) == 6


@pytest.mark.parametrize("kind", ["nowhere", "empty", "pairs", "file"])
def test_what_is_no_caption_folder_is_refused(tmp_path, kind):
    root = tmp_path / kind
    if kind == "empty":
        root.mkdir()
    if kind == "file":
        root.write_text("file_name,prompt")
    if kind == "pairs":
        make_pairs(root, [(32, 32)])
    message = {
        "nowhere": "no such folder",
        "empty": r"no images \(.bmp",
        "file": "neither a folder nor",
        "pairs": "is a set of pairs",
    }
    with pytest.raises(UserError, match=message[kind]):
        find_captioned([Root(root)], None)
