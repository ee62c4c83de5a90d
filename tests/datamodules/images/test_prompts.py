"""Several captions of one picture."""

import json

import pytest

from datamodules.errors import UserError
from datamodules.images.captions import find_captioned
from datamodules.images import prompts as reading
from datamodules.images.folders import Listing
from datamodules.images.sample import Root
from datamodules.images.sources import find_samples
from tests.support.pictures import make_pairs
from tests.support.stored import picture


def read_prompts(picture, per_line=True):
    return reading.read_prompts(Listing.of(picture.parent).texts.get(picture.stem, []), per_line)[0]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\n\n two \r\nthree", ("one", "two", "three")),
        ("\ufeffone", ("one",)),
        ("\n \n", ("",)),
        ("", ("",)),
    ],
)
def test_each_line_of_the_text_is_a_caption(tmp_path, text, prompts):
    (tmp_path / "x.txt").write_bytes(text.encode())
    assert read_prompts(tmp_path / "x.png") == prompts


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("one\ntwo", ("one\ntwo",)),
        (["one", " two ", ""], ("one", "two")),
        ({"caption": "one", "url": "x"}, ("one",)),
        ({"captions": ["one", "two"], "caption": "three"}, ("one", "two")),
        ({"prompt": "one"}, ("one",)),
        ([], ("",)),
        ({"url": "x"}, ()),
    ],
)
def test_json_beside_the_picture(tmp_path, value, prompts):
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_prompts(tmp_path / "x.png") == prompts


def test_text_comes_before_json(tmp_path):
    (tmp_path / "x.json").write_text('{"caption": "two"}')
    (tmp_path / "x.txt").write_text("one")
    assert read_prompts(tmp_path / "x.png") == ("one",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "x.json is not JSON: Expecting"),
        ("3", "captions are a text"),
        ('{"caption": 3}', "a list of texts"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_json_that_is_none_is_a_line(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "x.png")


def test_captions_of_pairs_and_of_pictures(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 4)
    (root / "training_images" / "00.txt").write_text("one\ntwo")
    for number, text in ((1, '["three", "four"]'), (2, "{broken"), (3, '{"url": "x"}')):
        (root / "training_images" / f"0{number}.txt").unlink()
        (root / "training_images" / f"0{number}.json").write_text(text)
    found = find_samples([Root(root)])
    assert [sample.prompts for sample in found.samples] == [("one", "two"), ("three", "four")]
    assert "02.json is not JSON" in found.incomplete[0]
    assert found.incomplete[1].endswith("03.png has no caption " + str(root / "training_images" / "03.txt"))
    alone = find_captioned([Root(root / "training_images")], "sks")
    assert [sample.prompts for sample in alone.samples] == [("one", "two"), ("three", "four"), ("sks",)]
    assert len(alone.incomplete) == 1


def test_prompts_of_a_table_may_be_lists(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(0))
    row = {"file_name": "a.png", "control_file_name": "b.png", "prompt": ["one", "two"]}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    assert find_samples([Root(tmp_path)]).samples[0].prompts == ("one", "two")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": ["three"]}))
    assert find_captioned([Root(tmp_path)], None).samples[0].prompts == ("three",)


def test_image_folder_with_captions_in_a_table_further_down(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.png").write_bytes(picture(0))
    (tmp_path / "train" / "metadata.csv").write_text("file_name,text\na.png,a cup\n")
    assert [one.prompts for one in find_captioned([Root(tmp_path)], None).samples] == [("a cup",)]
