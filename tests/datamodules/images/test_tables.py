"""Which columns of a table of ours are what: its own names first, and pictures only where there are some."""

import csv

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.errors import UserError
from datamodules.images.samples import Root
from datamodules.images.sources import find_captioned, find_samples
from tests.support.stored import picture


def write(folder, **columns):
    """A metadata.csv of two rows, beside pictures of some names."""
    for number, name in enumerate(("a.png", "b.png", "m.png", "s.png")):
        (folder / name).write_bytes(picture(number))
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([columns.values()] * 2)
    return Root(folder)


OURS = {"file_name": "a.png", "control_file_name": "b.png", "prompt": "make it snow"}


@pytest.mark.parametrize("word", ["edit", "instruction", "caption", "image", "result", "target", "mask", "control"])
@pytest.mark.parametrize("value", ["words", "s.png"])
def test_names_of_ours_win_over_every_guess(tmp_path, word, value):
    root = write(tmp_path, **{word: value}, **OURS, mask_file_name="m.png")
    found = find_samples([root])
    assert found.incomplete == []
    assert [(one.target.name, [two.name for two in one.controls], one.prompts) for one in found.samples] == [
        ("a.png", ["b.png"], ("make it snow",))
    ] * 2
    assert {one.mask for one in found.samples} == {tmp_path / "m.png"}


def test_further_controls_of_ours_are_numbered(tmp_path):
    root = write(tmp_path, **OURS, control_file_name_2="s.png", control="words")
    assert [one.name for one in find_samples([root]).samples[0].controls] == ["b.png", "s.png"]


def test_what_is_named_wins_over_names_of_ours(tmp_path):
    root = write(tmp_path, file_name="a.png", edited_file_name="b.png", prompt="x")
    [sample, _] = find_samples([Root(root.path, columns={"control": "file_name"})]).samples
    assert (sample.target.name, sample.controls[0].name) == ("b.png", "a.png")


@pytest.mark.parametrize("word", ["mask", "source", "image"])
def test_words_are_no_pictures(tmp_path, word):
    root = write(tmp_path, source_file_name="b.png", edited_file_name="a.png", instruction="x", **{word: "a lake"})
    [sample, _] = find_samples([root]).samples
    assert (sample.target.name, sample.controls[0].name, sample.mask) == ("a.png", "b.png", None)


@pytest.mark.parametrize("source", ["wikimedia", "https://example.com/a.jpg", "IMG_0001.jpg"])
def test_a_source_that_is_no_picture_makes_no_pairs(tmp_path, source):
    root = write(tmp_path, file_name="a.png", text="a cup", source=source)
    assert [one.prompts for one in find_captioned([root], None).samples] == [("a cup",)] * 2
    (tmp_path / "pairs").mkdir()
    root = write(tmp_path / "pairs", file_name="a.png", text="a cup", source="b.png")
    with pytest.raises(UserError, match=r"metadata.csv is a set of pairs"):
        find_captioned([root], None)


@pytest.mark.parametrize("missing", ["source_file_name", "edited_file_name", "mask"])
def test_pictures_that_are_all_missing_are_said(tmp_path, missing):
    columns = {"source_file_name": "b.png", "edited_file_name": "a.png", "instruction": "x", "mask": "m.png"}
    found = find_samples([write(tmp_path, **columns | {missing: "there/no.png"})])
    assert found.samples == []
    assert f"row 1: {tmp_path}/there/no.png: No such file or directory" in found.incomplete[0]


def test_columns_in_doubt_are_said_whatever_else_there_is(tmp_path):
    root = write(tmp_path, source_img="a.png", source_image="b.png", target="m.png", source="x", prompt="x")
    with pytest.raises(UserError, match=r"metadata.csv: source_img and source_image may both be the control"):
        find_samples([root])


def test_pictures_in_doubt_are_not_settled_by_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.png").write_bytes(picture(0))
    pictures = {name: [picture(1)] for name in ("source_img", "source_image", "target")}
    pq.write_table(pa.table({"source": ["a.png"], "text": ["x"], **pictures}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="source_img and source_image may both be the control"):
        find_samples([Root(tmp_path / "x.parquet")])
