"""task=inspect finds what is wrong with a data set, nothing else, and changes nothing."""

import csv
import hashlib

import pytest
from PIL import Image

from tests.support.faults import picture, save_edits, save_faults, save_pair


def content(folder):
    """Return names, checksums and times of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {(path, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def findings(output):
    with (output / "inspect.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def inspect(run, tiny, tmp_path):
    """Run predict.py on a root; returns what it printed and its folder."""

    def inspect(root, *overrides, task="inspect"):
        output = tmp_path / task
        settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", "data.resolution=512"]
        folders = [f"data.root={root}", f"output_dir={output}", f"data.cache_dir={tmp_path / 'cache'}"]
        return run("predict", f"task={task}", *settings, *folders, *overrides).text, output

    return inspect


@pytest.mark.slow
def test_every_fault_is_found_where_it_is_and_nothing_else(inspect, tmp_path):
    root, held_out = tmp_path / "data", tmp_path / "held_out"
    planted = save_faults(root, held_out)
    before = content(root), content(held_out)
    text, output = inspect(root, f"data.val_root={held_out}")
    assert {(row["sample"], row["finding"]) for row in findings(output)} == planted
    assert len(findings(output)) == len(planted)
    assert (content(root), content(held_out)) == before
    figures = {row["sample"]: row["figure"] for row in findings(output)}
    assert figures["shifted"] == "9 px right, 6 px up (2.2 %)"
    assert 1.038 < float(figures["scaled"].removeprefix("x ")) < 1.042
    assert figures["leak"] == "target as learned"
    assert figures["twice_1"] == "as twice_0"
    assert figures["small"] == "240x320, data.resolution=512"
    assert figures["proportion"] == "control 300x384, target 512x384"
    assert findings(output)[0]["finding"] == "leak"
    assert f"{len(planted)} findings in" in text
    assert "1 shifted" in text
    assert Image.open(output / "inspect.png").width > 1000


@pytest.mark.slow
def test_a_shared_instruction_and_several_edits_of_one_picture_are_no_faults(inspect, tmp_path):
    root = tmp_path / "data"
    save_edits(root)
    (root / "metadata.csv").write_text(
        "file_name,control_file_name,prompt\n"
        "training_images/inverted.png,control_images/inverted.png,invert it\n"
        "training_images/inverted.png,control_images/inverted.png,show me the negative\n"
        "training_images/mirrored.png,control_images/mirrored.png,mirror it\n"
    )
    assert "nothing found in 3 pairs" in inspect(root)[0]


def test_pictures_without_controls_are_inspected_too(run, repositories, tmp_path):
    root, output = tmp_path / "pictures", tmp_path / "output"
    root.mkdir()
    for name, photo in (("one", "coffee"), ("again", "coffee"), ("other", "rocket")):
        picture(photo).save(root / f"{name}.png")
        (root / f"{name}.txt").write_text(f"a picture called {name}")
    model = ["model=flux_dev", f"model.pretrained_model_name_or_path={repositories['flux_dev']}", "data=captions"]
    settings = [*model, f"data.root={root}", "data.resolution=512", f"output_dir={output}"]
    assert "1 finding in 3 samples: 1 duplicate" in run("predict", "task=inspect", *settings).text
    (root / "again.png").unlink()
    (root / "again.txt").unlink()
    assert "nothing found in 2 samples" in run("predict", "task=inspect", *settings).text
    assert not output.exists(), "what was found before is not left there"


@pytest.mark.slow
def test_preview_says_what_inspect_would_find(inspect, tmp_path):
    root = tmp_path / "data"
    save_edits(root)
    assert "note: inspect" not in inspect(root, task="preview")[0]
    save_pair(root, "equal", picture("rocket"), picture("rocket"), "nothing changes in this one")
    text, _ = inspect(root, task="preview")
    assert "note: inspect: 1 equal" in text
    assert "predict.py task=inspect model=flux_kontext" in text
    assert str(root) in text.partition("task=inspect")[2]
