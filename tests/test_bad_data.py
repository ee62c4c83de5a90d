"""Data that cannot be learned from: one line that says what, where and what to do, and no folder is left."""

import pytest
from PIL import Image

from tests.support.combinations import first
from tests.support.commands import short
from tests.support.pictures import make_pairs, photograph


@pytest.fixture
def folder(tmp_path):
    return make_pairs(tmp_path / "mine", [(32, 32)] * 3)


def test_root_may_have_any_name(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "my päirs, [old] (снег) = 雪", [(32, 32)] * 2)
    assert "2 pairs" in run("train", *short(tiny, root, tmp_path / "выход", 1)).text
    assert (tmp_path / "выход" / "lora" / "last").is_dir()


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
