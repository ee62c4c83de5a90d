"""Several captions of one picture."""

import json
from pathlib import Path

import pytest

from datamodules.edits import EditsDataModule
from datamodules.errors import UserError
from datamodules.images.folders import Listing
from datamodules.images.inspection import Kind, caption_findings
from datamodules.images.samples import Root, Sample
from datamodules.images.sources import find_captioned, find_samples
from tasks.settings import check_ranges
from tests.support.commands import compose
from tests.support.pictures import make_pairs
from tests.support.stored import picture, tar_members, write_tar


def read_prompts(picture, per_line=True):
    return Listing.of(picture.parent).captions(picture.stem, per_line)[0]


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


def test_two_files_of_one_caption_are_one_and_of_two_captions_are_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"caption": "one two", "url": "x"}')
    (tmp_path / "x.txt").write_text("one\ntwo")
    assert read_prompts(tmp_path / "x.png") == ("one", "two")
    (tmp_path / "x.caption").write_text("three")
    with pytest.raises(UserError, match=r"x.txt and .*x.caption and .*x.json hold different captions of one image"):
        read_prompts(tmp_path / "x.png")
    (tmp_path / "x.caption").unlink()
    for other in ('{"width": 3}', "[[1, 2], [3, 4]]", '{"title": "about the file"}'):
        (tmp_path / "x.json").write_text(other)
        assert read_prompts(tmp_path / "x.png") == ("one", "two"), "what is no caption differs from none"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_captions_end_at_line_ends_alone(tmp_path, separator):
    caption = f"a cat{separator}on a mat"
    (tmp_path / "x.txt").write_bytes(f"{caption}\r\ntwo\rthree\nfour".encode())
    assert read_prompts(tmp_path / "x.png") == (caption, "two", "three", "four")
    (tmp_path / "x.txt").write_text(f"one\n{caption}\n", encoding="utf-8")
    data = EditsDataModule(None, None, str(tmp_path / "x.txt"), None, [0], [1.0], None, None, 4096, 1)
    assert [prompt for *_, own in data.groups for prompt in own] == ["one", caption]


@pytest.mark.parametrize("text", ['{\n  "scene": "a cup",\n  "light": ["soft"]\n}', '[\n  "a cup",\n  "a cat"\n]'])
def test_text_file_of_json_is_one_caption_in_training_and_prediction(tmp_path, text):
    (tmp_path / "x.txt").write_text(text + "\n")
    assert read_prompts(tmp_path / "x.png") == (text,)
    data = EditsDataModule(None, None, str(tmp_path / "x.txt"), None, [0], [1.0], None, None, 4096, 1)
    assert [prompt for *_, own in data.groups for prompt in own] == [text]
    members = {**tar_members([0]), "0000.txt": text.replace("\n", "\r\n").encode()}
    [sample] = find_samples([Root(write_tar(tmp_path / "x.tar", members))]).samples
    assert sample.prompts == (text,)


STRUCTURED = {"scene": "a cup of tea", "colors": ["red", "blue"], "camera": {"lens": 50}}


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        (STRUCTURED, (json.dumps(STRUCTURED, indent=1),)),
        ({"prompt": STRUCTURED, "seed": 1}, (json.dumps(STRUCTURED),)),
        ({"captions": ["plain", STRUCTURED]}, ("plain", json.dumps(STRUCTURED))),
        ({"id": 3, "hash": "f00"}, ()),
    ],
)
def test_structured_prompt_is_one_caption(tmp_path, value, prompts):
    (tmp_path / "x.json").write_text(json.dumps(value, indent=1))
    assert read_prompts(tmp_path / "x.png") == prompts
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(0))
    if "prompt" in value:
        row = {"file_name": "a.png", "control_file_name": "b.png", "prompt": value["prompt"]}
        (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
        assert find_samples([Root(tmp_path)]).samples[0].prompts == prompts


def test_structured_prompts_of_a_tar_are_captions_where_there_are_no_others(tmp_path):
    text = json.dumps(STRUCTURED, indent=1)
    members = {name: content for name, content in tar_members([0]).items() if not name.endswith(".txt")}
    alone = write_tar(tmp_path / "x.tar", {**members, "0000.json": text.encode()})
    assert find_samples([Root(alone)]).samples[0].prompts == (text,)
    both = write_tar(tmp_path / "y.tar", {**members, "0000.json": text.encode(), "0000.caption": b"one\ntwo"})
    assert find_samples([Root(both)]).samples[0].prompts == ("one", "two")
    different = {**members, "0000.json": b'{"caption": "three"}', "0000.TXT": b"one"}
    found = find_samples([Root(write_tar(tmp_path / "z.tar", {**different, **tar_members([1])}))])
    assert ([one.key for one in found.samples], len(found.incomplete)) == (["0001"], 1)
    assert "hold different captions of one image" in found.incomplete[0]


def test_one_file_is_one_caption_where_asked(tmp_path):
    paragraphs = "A cup.\n\nIt stands on a table."
    root = make_pairs(tmp_path / "pairs", [(32, 32)])
    (root / "training_images" / "00.txt").write_text(paragraphs)
    tar = write_tar(tmp_path / "x.tar", {**tar_members([0]), "0000.txt": paragraphs.encode()})
    for place in (root, tar):
        assert find_samples([Root(place)]).samples[0].prompts == ("A cup.", "It stands on a table.")
        assert find_samples([Root(place, caption_per_line=False)]).samples[0].prompts == (paragraphs,)
    for setting in ("data.caption_per_line", "data.alpha_mask"):
        with pytest.raises(UserError, match=f"{setting}=maybe: must be true or false"):
            check_ranges(compose("train", f"{setting}=maybe"), "train")


@pytest.mark.parametrize("suffix", [".caption", ".TXT", ".Caption", ".JSON"])
def test_captions_have_several_suffixes_in_any_case(tmp_path, suffix):
    root = make_pairs(tmp_path, [(32, 32)])
    (root / "training_images" / "00.txt").unlink()
    (root / "training_images" / f"00{suffix}").write_text('"a cup"' if suffix == ".JSON" else "a cup")
    [sample] = find_samples([Root(root)]).samples
    assert (sample.prompts, sample.caption_file.name) == (("a cup",), f"00{suffix}")
    [alone] = find_captioned([Root(root / "training_images")], None).samples
    assert alone.prompts == ("a cup",)


def test_missing_caption_names_the_files_that_are_there(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)])
    (root / "training_images" / "00.txt").rename(root / "training_images" / "00.tags")
    (root / "control_images" / "00.txt").write_text("a cup")
    [line] = find_samples([Root(root)]).incomplete
    assert line.endswith(f"(there is {root}/training_images/00.tags, {root}/control_images/00.txt)")


def test_captions_without_letters_are_found():
    texts = {
        "a": ("{", '"scene": "a cup"', "}"),
        "b": ("1girl",),
        "c": ("ein Haus",),
        "d": ("\u732b",),
        "e": ("12 \U0001f600",),
    }
    samples = [Sample(key, Path(f"{key}.png"), (), prompts) for key, prompts in texts.items()]
    found = [finding for finding in caption_findings(samples) if finding.kind is Kind.NO_LETTERS]
    assert [(one.key, one.figure) for one in found] == [("a", "{, }"), ("e", "12 \U0001f600")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "x.json is not JSON: Expecting"),
        ("3", "captions must be a text"),
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
    place = root / "training_images" / "03"
    assert found.incomplete[1] == f"{place}.png has no caption {place}.txt (there is {place}.json)"
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
