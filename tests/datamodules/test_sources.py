"""Which samples a root holds."""

import json

import pytest

from datamodules.errors import UserError, listing
from datamodules.sources import find_samples
from tests.conftest import make_pairs, photograph


def save(path, size=(32, 32)):
    path.parent.mkdir(parents=True, exist_ok=True)
    photograph("coffee", *size).save(path)
    return path


@pytest.mark.parametrize("targets", ["training_images", "images", "target", "targets"])
@pytest.mark.parametrize("controls", ["control_images", "control", "controls", "condition_images"])
def test_folder_names(tmp_path, targets, controls):
    save(tmp_path / targets / "a.png")
    (tmp_path / targets / "a.txt").write_text("make it snow\n")
    save(tmp_path / controls / "a.jpg")
    (sample,) = find_samples([tmp_path]).samples
    assert sample.key == "a"
    assert sample.prompt == "make it snow"
    assert sample.target == tmp_path / targets / "a.png"
    assert sample.controls == (tmp_path / controls / "a.jpg",)


def test_further_controls_by_number_and_mask(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 2)
    for name in ("00_control_10.png", "00_control_2.jpg", "00_control_1.webp", "00_mask.png"):
        save(tmp_path / "control_images" / name)
    first, second = find_samples([tmp_path]).samples
    names = ["00.png", "00_control_1.webp", "00_control_2.jpg", "00_control_10.png"]
    assert [path.name for path in first.controls] == names
    assert first.mask.name == "00_mask.png"
    assert len(second.controls) == 1
    assert second.mask is None


def test_mask_may_stand_beside_the_target(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    mask = save(tmp_path / "training_images" / "00_mask.png")
    found = find_samples([tmp_path])
    assert found.samples[0].mask == mask
    assert found.incomplete == []


def test_several_roots_are_mixed_with_keys_of_their_own(tmp_path):
    make_pairs(tmp_path / "a", [(32, 32)] * 2)
    make_pairs(tmp_path / "b", [(32, 32)])
    keys = [sample.key for sample in find_samples([tmp_path / "a", tmp_path / "b"]).samples]
    assert keys == [f"{tmp_path}/a/00", f"{tmp_path}/a/01", f"{tmp_path}/b/00"]


def table_rows(folder):
    for name in ("t/1.png", "c/1.png", "c/2.png", "m/1.png"):
        save(folder / name)
    return [
        {
            "file_name": "t/1.png",
            "control_file_name": "c/1.png",
            "prompt": "one, with comma",
            "mask_file_name": "m/1.png",
        },
        {"file_name": "t/1.png", "control_file_name": ["c/1.png", "c/2.png"], "prompt": "schön"},
    ]


def check_table(folder, root):
    one, two = find_samples([root]).samples
    assert one.prompt == "one, with comma"
    assert one.mask == folder / "m/1.png"
    assert two.prompt == "schön"
    assert two.controls == (folder / "c/1.png", folder / "c/2.png")
    assert two.mask is None
    assert one.key != two.key


def test_jsonl_table(tmp_path):
    rows = table_rows(tmp_path)
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    check_table(tmp_path, tmp_path)
    check_table(tmp_path, tmp_path / "metadata.jsonl")


def test_csv_table_as_spreadsheets_write_it(tmp_path):
    import csv
    import io

    rows = table_rows(tmp_path)
    rows[1]["control_file_name"] = json.dumps(rows[1]["control_file_name"])
    text = io.StringIO()
    writer = csv.DictWriter(text, ["file_name", "control_file_name", "prompt", "mask_file_name"])
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "metadata.csv").write_text(text.getvalue(), encoding="utf-8-sig")
    check_table(tmp_path, tmp_path)


def test_csv_prompt_may_have_several_lines(tmp_path):
    table_rows(tmp_path)
    (tmp_path / "metadata.csv").write_text('file_name,control_file_name,prompt\nt/1.png,c/1.png,"two\nlines"\n')
    assert find_samples([tmp_path]).samples[0].prompt == "two\nlines"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{nonsense", "line 1 is not JSON"),
        ('{"file_name": "a.png", "prompt": "x"}', "row 1 has no control_file_name; its columns are file_name, prompt"),
        ('["a"]', "line 1 is not an object of columns"),
    ],
)
def test_unusable_table(tmp_path, text, message):
    (tmp_path / "metadata.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        find_samples([tmp_path])


def test_table_row_of_a_missing_file_is_incomplete(tmp_path):
    rows = table_rows(tmp_path)
    rows[0]["control_file_name"] = "c/9.png"
    rows[1]["control_file_name"] = []
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = find_samples([tmp_path])
    assert found.samples == []
    assert "row 1: " in found.incomplete[0]
    assert "c/9.png does not exist" in found.incomplete[0]
    assert "row 2: control_file_name is empty" in found.incomplete[1]


def test_two_images_of_one_name_are_refused(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    save(tmp_path / "control_images" / "00.jpg")
    with pytest.raises(UserError, match="two images of one name"):
        find_samples([tmp_path])


def test_listing_counts_the_rest():
    assert listing(["a", "b"]) == "a, b"
    assert listing(list("abcde")) == "a, b, c and 2 more"
