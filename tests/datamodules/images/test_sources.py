"""Which samples a root holds."""

import json
import os
import shutil
import unicodedata

import pytest

from datamodules.edits import find_images
from datamodules.errors import UserError, count_of, listing
from datamodules.images.samples import Root
from datamodules.images.sources import find_samples
from tests.support.pictures import make_pairs, photograph
from tests.support.stored import write_tar


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
    (sample,) = find_samples([Root(tmp_path)]).samples
    assert sample.key == "a"
    assert sample.prompts[0] == "make it snow"
    assert sample.target == tmp_path / targets / "a.png"
    assert sample.controls == (tmp_path / controls / "a.jpg",)


def test_further_controls_by_number_and_mask(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 2)
    for name in ("00_control_10.png", "00_control_2.jpg", "00_control_1.webp", "00_mask.png"):
        save(tmp_path / "control_images" / name)
    first, second = find_samples([Root(tmp_path)]).samples
    names = ["00.png", "00_control_1.webp", "00_control_2.jpg", "00_control_10.png"]
    assert [path.name for path in first.controls] == names
    assert first.mask.name == "00_mask.png"
    assert len(second.controls) == 1
    assert second.mask is None


def numbered(root, *folders):
    """Pairs whose control images stand in several folders, each in a size of its own."""
    make_pairs(root, [(32, 32)] * 2)
    shutil.rmtree(root / "control_images")
    for number, folder in enumerate(folders, 1):
        for stem in ("00", "01"):
            save(root / folder / f"{stem}.png", (32 * number, 32))
    return root


@pytest.mark.parametrize(
    "folders",
    [
        ("control", "control_2", "control_3", "control_10"),
        ("control_1", "control_2"),
        ("control_images", "control_images_2"),
        ("condition_images", "control-2", "controls3"),
        ("control", "control_1"),
    ],
)
def test_numbered_folders_are_further_references(tmp_path, folders):
    root = numbered(tmp_path, *folders)
    found = find_samples([Root(root)])
    assert [one.controls for one in found.samples] == [
        tuple(root / folder / f"{stem}.png" for folder in folders) for stem in ("00", "01")
    ]
    assert (found.incomplete, found.notes) == ([], ())


def test_numbered_folders_and_numbered_files_are_read_folder_by_folder(tmp_path):
    root = numbered(tmp_path, "control", "control_2")
    further = save(root / "control" / "00_control_1.png")
    first, second = find_samples([Root(root)]).samples
    assert first.controls == (root / "control/00.png", further, root / "control_2/00.png")
    assert len(second.controls) == 2


def test_what_is_wrong_with_numbered_folders_is_said(tmp_path):
    root = numbered(tmp_path, "control", "control_2", "control_3")
    (root / "control_2" / "00.png").unlink()
    (root / "control_3" / "01.png").rename(root / "control_3" / "02.png")
    found = find_samples([Root(root)])
    assert [(one.key, len(one.controls)) for one in found.samples] == [("01", 2)]
    assert [line.replace(f"{root}/", "").partition(" is none of .")[0] for line in found.incomplete] == [
        "training_images/00.png has no control image control_2/00.*",
        "control_3/02.png has no target image training_images/02.*",
    ]
    (root / "control_02").mkdir()
    with pytest.raises(UserError, match=r"control_02 and control_2 have the same number\. Rename one"):
        find_samples([Root(root)])


def test_what_bears_the_name_of_a_sample_and_is_not_read_is_named(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 2)
    for name in ("depth/00.png", "depth/01.png", "masks/00.png", "training_images/old/01.png", "elsewhere/99.png"):
        save(root / name)
    save(root / "training_images" / "00_control_1.png")
    save(root / "controls" / "00.jpg")
    (root / "training_images" / "01.npz").write_bytes(b"x")
    (root / "control_images" / "01.txt").write_text("a cup")
    (root / "training_images" / ".00.png").write_bytes(b"x")
    (root / "README.md").write_text("about")
    [note] = find_samples([Root(root)]).notes
    assert note.startswith(f"{root}: not read, though named like images that are: ")
    assert note.endswith(" and 4 more")
    for kind in ("depth/*.png (2)", "masks/*.png (1)", "training_images/old/*.png (1)"):
        name = kind.partition("/*")[0]
        only = make_pairs(tmp_path.with_name(f"only {name.replace('/', ' ')}"), [(32, 32)] * 2)
        shutil.copytree(root / name, only / name)
        assert find_samples([Root(only)]).notes == (f"{only}: not read, though named like images that are: {kind}",)


def test_pairs_in_one_folder_and_tables_name_what_they_do_not_read(tmp_path):
    for name in ("a_start.png", "a_end.png", "depth/a_end.png"):
        save(tmp_path / "one" / name)
    (tmp_path / "one" / "a.txt").write_text("a cup")
    assert find_samples([Root(tmp_path / "one")]).notes[0].endswith("images that are: depth/*.png (1)")
    rows = table_rows(tmp_path / "table")
    rows = [{**row, "depth": "m/1.png", "style_image": "c/2.png", "words": "x"} for row in rows]
    (tmp_path / "table" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [note, *_] = find_samples([Root(tmp_path / "table")]).notes
    assert note.endswith("metadata.jsonl: images of other columns are not read: depth, style_image")


def test_root_that_is_the_present_folder_has_nothing_unread(tmp_path, monkeypatch):
    make_pairs(tmp_path, [(32, 32)])
    monkeypatch.chdir(tmp_path)
    assert find_samples([Root(".")]).notes == ()


@pytest.mark.parametrize(("on_disk", "named"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_names_in_other_forms_of_unicode_match(tmp_path, on_disk, named):
    """As between a Mac and what else there is: é of one character and of two."""
    here, there = (unicodedata.normalize(form, "caf\u00e9 \u00c5") for form in (on_disk, named))
    for name in (f"control_images/{there}.png", f"training_images/{here}.png", f"control_images/{there}_mask.png"):
        save(tmp_path / "folders" / name)
    save(tmp_path / "folders" / "control_images" / f"{here}_control_1.png")
    (tmp_path / "folders" / "training_images" / f"{there}.txt").write_text("a cup")
    found = find_samples([Root(tmp_path / "folders")])
    assert (found.incomplete, found.notes) == ([], ())
    [sample] = found.samples
    assert (len(sample.controls), sample.prompts, sample.mask is None) == (2, ("a cup",), False)
    for name in (f"{here}_start.png", f"{there}_end.png"):
        save(tmp_path / "one" / name)
    (tmp_path / "one" / f"{here}.txt").write_text("a cup")
    assert len(find_samples([Root(tmp_path / "one")]).samples) == 1
    save(tmp_path / "table" / here / f"{here}.png")
    row = {"file_name": f"{there}/{there}.png", "control_file_name": f"{there}/{here}.png", "prompt": "x"}
    (tmp_path / "table" / "metadata.jsonl").write_text(json.dumps(row))
    [sample] = find_samples([Root(tmp_path / "table")]).samples
    assert sample.target.samefile(sample.controls[0])
    members = {f"{here}.source.png": b"", f"{there}.target.png": b"", f"{there}.txt": b"a cup"}
    assert len(find_samples([Root(write_tar(tmp_path / "x.tar", members))]).samples) == 1
    assert find_images(str(tmp_path / "table" / there / f"{there}.png"))[0][0].samefile(sample.target)


def test_mask_may_stand_beside_the_target(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    mask = save(tmp_path / "training_images" / "00_mask.png")
    found = find_samples([Root(tmp_path)])
    assert found.samples[0].mask == mask
    assert found.incomplete == []


def test_several_roots_are_mixed_with_keys_of_their_own(tmp_path):
    make_pairs(tmp_path / "a", [(32, 32)] * 2)
    make_pairs(tmp_path / "b", [(32, 32)])
    keys = [sample.key for sample in find_samples([Root(tmp_path / "a"), Root(tmp_path / "b")]).samples]
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
    one, two = find_samples([Root(root)]).samples
    assert one.prompts[0] == "one, with comma"
    assert one.mask == folder / "m/1.png"
    assert two.prompts[0] == "schön"
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
    assert find_samples([Root(tmp_path)]).samples[0].prompts[0] == "two\nlines"


HEADER = "file_name,control_file_name,prompt\n"
FIRST = "t/1.png,c/1.png,make it red\n"
LAST = "t/1.png,c/2.png,make it blue\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("t/1.png,c/1.png,make it snow, please\n", "line 3: 4 values for 3 columns .* comma needs quotes"),
        ("t/1.png,c/1.png\n", "line 3: 2 values for 3 columns"),
        ('t/1.png,c/1.png,"make it snow\n', "line 3: a quote is left open"),
        (f't/1.png,c/1.png,"make it snow\n{LAST}t/1.png,c/1.png,"rain"\n', "line 3: a quote is left open"),
        ('t/1.png,c/1.png,"make it "snow" now"\n', "line 3: a quote is left open, or not doubled"),
    ],
)
def test_csv_row_whose_values_are_in_doubt_is_named(tmp_path, rows, message):
    table_rows(tmp_path)
    (tmp_path / "metadata.csv").write_text(HEADER + FIRST + rows + LAST)
    with pytest.raises(UserError, match=f"metadata.csv {message}"):
        find_samples([Root(tmp_path)])


def test_csv_of_a_spreadsheet_may_have_empty_rows_and_spaces_behind_commas(tmp_path):
    table_rows(tmp_path)
    (tmp_path / "metadata.csv").write_text(HEADER + FIRST + ',,\n\nt/1.png, c/2.png, "snow, please"\n')
    assert [sample.prompts[0] for sample in find_samples([Root(tmp_path)]).samples] == ["make it red", "snow, please"]


@pytest.mark.parametrize("value", [{"prompt": "\ud83d"}, {"prompt": float("nan")}, {"control_file_name": {"a": 1}}])
def test_value_that_is_no_text_is_named(tmp_path, value):
    rows = [table_rows(tmp_path)[0], {"file_name": "t/1.png", "control_file_name": "c/1.png", "prompt": "x", **value}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=f"row 2: .*{next(iter(value))}"):
        find_samples([Root(tmp_path)])


@pytest.mark.parametrize(
    ("name", "text"),
    [("metadata.csv", "prompt,prompt,file_name\n1,2,3\n"), ("metadata.jsonl", '{"prompt": "a", "prompt": "b"}')],
)
def test_column_that_is_there_twice_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="has the column prompt twice"):
        find_samples([Root(tmp_path)])


def test_two_tables_are_refused(tmp_path):
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"two tables, metadata\.jsonl and metadata\.csv"):
        find_samples([Root(tmp_path)])


@pytest.mark.parametrize("name", ["metadata.csv", "training_images/00.txt"])
@pytest.mark.parametrize("kind", ["pipe", "dangling"])
def test_text_that_is_no_file_is_said_at_once(tmp_path, name, kind):
    make_pairs(tmp_path, [(32, 32)])
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/nowhere")
    expected = f"cannot read {tmp_path / name}: it is a {'pipe' if kind == 'pipe' else 'link to /nowhere'}"
    if name.endswith(".csv"):
        with pytest.raises(UserError, match=expected):
            find_samples([Root(tmp_path)])
    else:
        [line] = find_samples([Root(tmp_path)]).incomplete
        assert line.startswith(expected)


def test_root_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(UserError, match=r"neither a folder nor a \.csv or \.jsonl table"):
        find_samples([Root(tmp_path / "x")])


def test_picture_in_a_format_that_is_not_read_is_named(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 4)
    for name in ("control_images/01", "training_images/02", "training_images/03", "control_images/03"):
        (tmp_path / f"{name}.png").rename(tmp_path / f"{name}.gif")
    found = find_samples([Root(tmp_path)])
    assert [sample.key for sample in found.samples] == ["00"]
    assert [line.replace(f"{tmp_path}/", "").partition(" is none of .bmp")[0] for line in found.incomplete] == [
        "training_images/01.png has no control image control_images/01.*: control_images/01.gif",
        "control_images/02.png has no target image training_images/02.*: training_images/02.gif",
        "training_images/03.gif",
    ]


def test_names_of_any_bytes_and_roots_named_twice_give_keys_of_their_own(tmp_path):
    make_pairs(tmp_path, [(32, 32)] * 3)
    names = {"00": "photo.", "01": os.fsdecode(b"caf\xe9"), "02": "a\nb"}
    for path in list(tmp_path.rglob("0?.*")):
        path.rename(path.with_name(names[path.stem] + path.suffix))
    keys = [sample.key for sample in find_samples([Root(tmp_path)]).samples]
    assert keys == [r"a\nb", r"caf\udce9", "photo."]
    twice = [sample.key for sample in find_samples([Root(tmp_path), Root(tmp_path)]).samples]
    assert len(set(twice)) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{nonsense", "line 1 is not JSON"),
        (
            '{"file_name": "a.png", "prompt": "x"}',
            "has no column of condition images; its columns are",
        ),
        ('["a"]', "line 1 is not an object of columns"),
    ],
)
def test_unusable_table(tmp_path, text, message):
    (tmp_path / "metadata.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        find_samples([Root(tmp_path)])


def test_table_row_of_a_missing_file_is_incomplete(tmp_path):
    rows = table_rows(tmp_path)
    rows[0]["control_file_name"] = "c/9.png"
    rows[1]["control_file_name"] = []
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = find_samples([Root(tmp_path)])
    assert found.samples == []
    assert "row 1: " in found.incomplete[0]
    assert "c/9.png: No such file" in found.incomplete[0]
    assert "row 2: control_file_name is empty" in found.incomplete[1]


def test_two_images_of_one_name_are_refused(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    save(tmp_path / "control_images" / "00.jpg")
    with pytest.raises(UserError, match="two images of one name"):
        find_samples([Root(tmp_path)])


def test_one_is_no_plural():
    assert count_of(1, "pairs have sides, and are cropped") == "1 pair has sides, and is cropped"
    assert count_of(0, "findings") == "0 findings"
    assert count_of(1200, "pairs are") == "1,200 pairs are"


def test_listing_counts_the_rest():
    assert listing(["a", "b"]) == "a, b"
    assert listing(list("abcde")) == "a, b, c and 2 more"
