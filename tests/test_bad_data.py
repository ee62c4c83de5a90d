"""Data that cannot be learned from: one line that says what, where and what to do, and no folder is left."""

import pytest

from tests.support.commands import scanned, short
from tests.support.pictures import make_pairs, photograph


@pytest.fixture
def folder(tmp_path):
    return make_pairs(tmp_path / "mine", [(32, 32)] * 3)


def test_incomplete_pairs_are_listed_and_counted_or_skipped(refuses, folder):
    for name in ("a", "b", "c", "d"):
        photograph("coffee", 32, 32).save(folder / "training_images" / f"{name}.png")
    photograph("coffee", 32, 32).save(folder / "control_images" / "z.png")
    (folder / "training_images" / "00.txt").unlink()
    words = ["6 incomplete", "00.png has no caption", "a.png has no control image", "and 3 more"]
    refuses(root=folder, words=[*words, "data.on_missing=skip"])
    data = scanned(f"data.root={folder}", "data.on_missing=skip")
    assert len(data.training.samples) == 2
    assert data.notes[0].startswith("skipped 6 incomplete")


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
