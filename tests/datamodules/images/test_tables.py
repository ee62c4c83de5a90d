"""Tables of samples: their rows, and which of their columns is what."""

import csv
import io
import json
import re

import pytest

from datamodules.images.samples import Root
from datamodules.images.sources import find_captioned, find_samples
from datamodules.images.tables import Table, choose_columns
from foundation.errors import UserError
from tests.support.stored import picture

# Columns of well-known editing sets, and their roles: target, controls, prompt and mask.
SETS = {
    "InstructPix2Pix": (
        ["original_prompt", "original_image", "edit_prompt", "edited_prompt", "edited_image"],
        ("edited_image", ["original_image"], "edit_prompt", []),
    ),
    "MagicBrush": (
        ["img_id", "turn_index", "source_img", "mask_img", "instruction", "target_img"],
        ("target_img", ["source_img"], "instruction", ["mask_img"]),
    ),
    "numbered": (
        ["input_image_2", "input_image_10", "input_image", "output_image", "source", "instruction"],
        ("output_image", ["input_image", "input_image_2", "input_image_10"], "instruction", []),
    ),
    "tars on the hub": (["__key__", "source.jpg", "target.jpg", "txt"], ("target.jpg", ["source.jpg"], "txt", [])),
    "exact among two": (["source", "source_image", "target", "caption"], ("target", ["source_image"], "caption", [])),
}
PAIRS = ["control", "target", "prompt"]
THREE = ["image", "source", "text"]


def table(columns, images):
    return Table("t", [], columns, lambda name: [], images)


@pytest.mark.parametrize("name", SETS)
def test_columns_of_well_known_sets_are_known(name):
    there, (target, controls, prompt, mask) = SETS[name]
    found = choose_columns(table(there, [target, *controls, *mask]), {}, PAIRS)
    assert (found["target"], found["control"], found["prompt"]) == ([target], controls, [prompt])
    assert found["mask"] == mask


def test_named_columns_win_and_a_bare_edit_is_the_last_name_of_a_prompt():
    given = {"control": ["b", "a"], "target": "image_2", "prompt": "words"}
    there = ["a", "b", "image", "image_2", "words", "prompt"]
    found = choose_columns(table(there, there[:4]), given, PAIRS)
    assert (found["target"], found["control"], found["prompt"]) == (["image_2"], ["b", "a"], ["words"])
    for word in ("prompt", "caption", "text", "instruction", "edit_prompt", "description"):
        columns = ["image", "source", "edit", word]
        assert choose_columns(table(columns, ["image", "source"]), {}, PAIRS)["prompt"] == [word]
    assert choose_columns(table(["image", "source", "edit"], ["image", "source"]), {}, PAIRS)["prompt"] == ["edit"]


@pytest.mark.parametrize(
    ("there", "given", "message"),
    [
        (
            ["a", "b"],
            {},
            "no column of condition images, column of targets, column of prompts; its columns are a, b: name them",
        ),
        (THREE, {"control": "src"}, "has no column src, which data.columns names for control; its"),
        (THREE, {"goal": "image"}, "there is no goal; choose from control, target, prompt, mask"),
        (["image", "source_img", "source_image", "text"], {}, "source_img and source_image may both be the control"),
    ],
)
def test_missing_and_ambiguous_columns_are_answered_with_the_existing_ones(there, given, message):
    with pytest.raises(UserError) as error:
        choose_columns(table(there, there), given, PAIRS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def write(folder, **columns):
    """A metadata.csv of two rows, next to images of some names."""
    for number, name in enumerate(("a.png", "b.png", "m.png", "s.png")):
        (folder / name).write_bytes(picture(number))
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([columns.values()] * 2)
    return Root(folder)


OURS = {"file_name": "a.png", "control_file_name": "b.png", "prompt": "make it snow"}


@pytest.mark.parametrize(("word", "value"), [("instruction", "words"), ("control", "s.png")])
def test_our_names_win_over_all_others(tmp_path, word, value):
    root = write(tmp_path, **{word: value}, **OURS, mask_file_name="m.png")
    found = find_samples([root])
    assert found.incomplete == []
    assert [(one.target.name, [two.name for two in one.controls], one.prompts) for one in found.samples] == [
        ("a.png", ["b.png"], ("make it snow",))
    ] * 2
    assert {one.mask for one in found.samples} == {tmp_path / "m.png"}


def test_numbered_controls_and_named_columns(tmp_path):
    root = write(tmp_path, **OURS, control_file_name_2="s.png", control="words")
    assert [one.name for one in find_samples([root]).samples[0].controls] == ["b.png", "s.png"]
    root = write(tmp_path, file_name="a.png", edited_file_name="b.png", prompt="x")
    [sample, _] = find_samples([Root(root.path, columns={"control": "file_name"})]).samples
    assert (sample.target.name, sample.controls[0].name) == ("b.png", "a.png")


@pytest.mark.parametrize("source", ["wikimedia", "https://example.com/a.jpg"])
def test_a_source_column_without_images_makes_no_pairs(tmp_path, source):
    root = write(tmp_path, file_name="a.png", text="a cup", source=source)
    assert [one.prompts for one in find_captioned([root], None).samples] == [("a cup",)] * 2
    root = write(tmp_path, file_name="a.png", text="a cup", source="b.png")
    with pytest.raises(UserError, match=r"metadata.csv is a set of pairs.*data.columns='\{target: file_name\}'"):
        find_captioned([root], None)
    [sample, _] = find_captioned([Root(root.path, columns={"target": "file_name"})], None).samples
    assert (sample.target.name, sample.controls) == ("a.png", ())


ROWS = [
    {"file_name": "t/1.png", "control_file_name": "c/1.png", "prompt": "one, with comma", "mask_file_name": "m/1.png"},
    {"file_name": "t/1.png", "control_file_name": ["c/1.png", "c/2.png"], "prompt": ["schön", "fine"]},
]


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(("t/1.png", "c/1.png", "c/2.png", "m/1.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(picture(number))
    return tmp_path


def write_rows(folder, *rows):
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return Root(folder)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_tables_as_programs_write_them(folder, suffix):
    write_rows(folder, *ROWS)
    if suffix == "csv":
        (folder / "metadata.jsonl").unlink()
        text = io.StringIO()
        writer = csv.DictWriter(text, list(ROWS[0]))
        writer.writeheader()
        writer.writerows([ROWS[0], ROWS[1] | {"control_file_name": json.dumps(ROWS[1]["control_file_name"])}])
        (folder / "metadata.csv").write_text(text.getvalue(), encoding="utf-8-sig")
    for root in (folder, folder / f"metadata.{suffix}"):
        one, two = find_samples([Root(root)]).samples
        assert (one.prompts, one.mask) == (("one, with comma",), folder / "m/1.png")
        assert (two.controls, two.mask) == ((folder / "c/1.png", folder / "c/2.png"), None)
        assert two.prompts == (("schön", "fine") if suffix == "jsonl" else ("['schön', 'fine']",))
        assert one.key != two.key


HEADER = "file_name,control_file_name,prompt\n"
FIRST, LAST = "t/1.png,c/1.png,make it red\n", "t/1.png,c/2.png,make it blue\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("t/1.png,c/1.png,make it snow, please\n", "line 3: 4 values for 3 columns .* comma needs quotes"),
        ('t/1.png,c/1.png,"make it snow\n', "line 3: a quote is left open"),
        (f't/1.png,c/1.png,"make it snow\n{LAST}t/1.png,c/1.png,rain"\n', "line 3: .* holds the row of t/1.png"),
        ('t/1.png,c/1.png,"make it "snow" now"\n', "line 3: a quote is left open, or not doubled"),
    ],
)
def test_ambiguous_rows_of_csv_are_named(folder, rows, message):
    (folder / "metadata.csv").write_text(HEADER + FIRST + rows + LAST)
    with pytest.raises(UserError, match=f"metadata.csv {message}"):
        find_samples([Root(folder)])


def test_csv_may_have_empty_rows_spaces_after_commas_and_prompts_of_several_lines(folder):
    text = HEADER + FIRST + ',,\n\nt/1.png, c/2.png, "snow, please"\n' + 't/1.png,c/1.png,"two\nlines"\n'
    (folder / "metadata.csv").write_text(text)
    prompts = [sample.prompts for sample in find_samples([Root(folder)]).samples]
    assert prompts == [("make it red",), ("snow, please",), ("two\nlines",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "prompt": "b"}', "has the column prompt twice"),
        ("", "has no rows"),
        ("{nonsense", "line 1 is not JSON"),
        ('{"file_name": "t/1.png", "prompt": "x"}', "no column of condition images; its columns are"),
    ],
)
def test_unusable_tables_are_refused(folder, text, message):
    (folder / "metadata.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        find_samples([Root(folder)])
    (folder / "metadata.csv").write_text("")
    with pytest.raises(UserError, match=r"two tables, metadata\.jsonl and metadata\.csv"):
        find_samples([Root(folder)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": "\ud83d"}, r"its caption contains '\\ud83d'"),
        ({"prompt": "m\0a\0k"}, r"its caption contains '\\x00'"),
        ({"control_file_name": {"a": 1}}, "row 2: control_file_name=.*: must be an image or a list"),
        ({"control_file_name": '["c/1.png"'}, "row 2: control_file_name=.*: several images must be written as"),
        ({"control_file_name": "c/9.png"}, "c/9.png: No such file"),
        ({"prompt": None}, "row 2: prompt is empty"),
    ],
)
def test_a_row_with_a_wrong_or_missing_value_is_named(folder, value, message):
    [line] = find_samples([write_rows(folder, ROWS[0], {**ROWS[0], **value})]).incomplete
    assert re.search(message, line)


def test_unread_columns_of_images_are_named(folder):
    rows = [{**row, "depth": "m/1.png", "style_image": "c/2.png", "words": "x"} for row in ROWS]
    [note, *_] = find_samples([write_rows(folder, *rows)]).notes
    assert note.endswith("metadata.jsonl: images of other columns are not read: depth, style_image")
