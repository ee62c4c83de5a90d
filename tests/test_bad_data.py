"""Data that cannot be learned from: one line that says what, where and what to do, and no folder is left."""

import pytest
from PIL import Image

from tests.support.combinations import first
from tests.support.commands import short
from tests.support.pictures import make_pairs, photograph


@pytest.fixture
def folder(tmp_path):
    return make_pairs(tmp_path / "mine", [(32, 32)] * 3)


def test_no_such_root(fails):
    assert "data.root=/nowhere: no such folder" in fails(root="/nowhere")


def test_root_that_is_a_picture(fails, folder):
    line = fails(root=folder / "control_images" / "00.png")
    assert "00.png: neither a folder nor a .csv or .jsonl table" in line


def test_root_may_have_any_name(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "my päirs, [old] (снег) = 雪", [(32, 32)] * 2)
    assert "2 pairs" in run("train", *short(tiny, root, tmp_path / "выход", 1)).text
    assert (tmp_path / "выход" / "lora" / "last").is_dir()


def test_empty_captions_are_counted(run, tiny, folder, tmp_path):
    (folder / "training_images" / "00.txt").write_text("\n")
    assert "1 caption is empty" in run("train", *short(tiny, folder, tmp_path / "run", 1)).text


def test_root_without_pairs_says_what_was_looked_for(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    line = fails(root=tmp_path / "empty")
    for word in ("no pairs", "metadata.jsonl", "training_images/images/target/targets", "control_images"):
        assert word in line


def test_folders_without_images(fails, tmp_path):
    for name in ("images", "control"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    assert "no images (.bmp" in fails(root=tmp_path / "empty")


def test_incomplete_pairs_are_listed_and_counted_or_skipped(fails, run, tiny, folder, tmp_path):
    for name in ("a", "b", "c", "d"):
        photograph("coffee", 32, 32).save(folder / "training_images" / f"{name}.png")
    photograph("coffee", 32, 32).save(folder / "control_images" / "z.png")
    (folder / "training_images" / "00.txt").unlink()
    line = fails(root=folder)
    assert "6 incomplete" in line
    assert "00.png has no caption" in line
    assert "a.png has no control image" in line
    assert "and 3 more" in line
    assert "data.on_missing=skip" in line
    text = run("train", *short(tiny, folder, tmp_path / "run", 1), "data.on_missing=skip").text
    assert "2 pairs" in text
    assert "skipped 6 incomplete" in text


@pytest.mark.parametrize("suffix", first(1, [".jpg", ".png", ".webp"]))
def test_truncated_image_is_named_or_skipped(fails, run, tiny, folder, tmp_path, suffix):
    good = folder / "control_images" / "00.png"
    bad = good.with_suffix(suffix)
    Image.open(good).resize((256, 256)).save(bad)
    if suffix != ".png":
        good.unlink()
    bad.write_bytes(bad.read_bytes()[:-600])
    line = fails(root=folder)
    assert f"cannot read the image {bad}" in line
    assert "data.on_bad_image=skip" in line
    text = run("train", *short(tiny, folder, tmp_path / "run", 1), "data.on_bad_image=skip").text
    assert "2 pairs" in text
    assert "skipped 1 unusable" in text


def test_file_that_is_no_image(fails, folder):
    (folder / "control_images" / "01.png").write_text("not a picture")
    assert "01.png" in fails(root=folder)


@pytest.mark.slow
def test_image_that_breaks_during_training_is_named_and_the_process_ends(start, tiny, folder, tmp_path):
    """A check at the start cannot see later changes of a file; a remaining worker must not delay the exit."""
    arguments = [*short(tiny, folder, tmp_path / "run", 2, "pairs"), "data.num_workers=1"]
    arguments.append(
        "+callbacks.vandal={_target_: tests.support.probes.Vandal, path: " + f"{folder}/control_images" + "}"
    )
    process = start("train", *arguments)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: cannot read the image" in text
    assert "Traceback" not in text


def test_tiny_image(fails, folder):
    photograph("coffee", 32, 15).save(folder / "control_images" / "01.png")
    assert "01.png is 32x15: both sides must be at least 16 pixels" in fails(root=folder)


def test_caption_that_is_not_utf8(fails, folder):
    (folder / "training_images" / "02.txt").write_bytes("schön".encode("latin-1"))
    assert "02.txt is not UTF-8 (byte 3)" in fails(root=folder)


def test_table_without_a_column(fails, tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,prompt\na.png,x\n")
    assert "metadata.csv has no column of condition images; its columns are file_name, prompt" in fails(root=tmp_path)
