"""The figures of docs/quality.md and of its study are the recorded ones, and none is older than its settings."""

import importlib.util
import re
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks.labels import labelled
from benchmarks.photos import pairs, runs
from benchmarks.quality import DOCS, PAGES, SECTIONS, outdated, read_records, written
from tests.support.commands import rows

TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]


def test_tables_and_images_are_those_of_the_sections():
    assert [written(text) for text in TEXTS] == TEXTS, "run python benchmarks/quality.py"
    both = "\n".join(TEXTS)
    markers = re.findall(r"^<!-- (?!end)(\w+) -->$", both, re.M)
    assert sorted(markers) == sorted(SECTIONS), "each table is on one of the two pages"
    assert both.count("<!-- end -->") == len(markers)
    images = {f"{name}.webp" for name, section in SECTIONS.items() if section.image is not None}
    assert images <= set(re.findall(r"[/(](\w+\.webp)\)", both))
    assert all((DOCS / image).is_file() for image in images)
    assert all(section.headers and section.labels for section in SECTIONS.values() if section.image is not None)


def test_labels_are_beside_the_image_and_centered_on_its_rows_and_columns():
    image = Image.new("RGB", (300, 240), "red")
    pixels = np.asarray(labelled(image, ("one", "a longer one"), ("above", "`below`, in many words")))
    left, above = pixels.shape[1] - 300, pixels.shape[0] - 240
    assert (pixels[above:, left:] == np.asarray(image)).all()
    columns = np.flatnonzero((pixels[:above] < 128).any((0, 2))) - left
    rows = np.flatnonzero((pixels[:, :left] < 128).any((1, 2))) - above
    for found, middles in ((columns, (75, 225)), (rows, (60, 180))):
        halves = np.split(found, [np.searchsorted(found, sum(middles) / 2)])
        assert [(half[0] + half[-1]) / 2 for half in halves] == pytest.approx(middles, abs=6)


def test_empty_markers_do_not_reach_to_the_end_of_the_next(monkeypatch):
    record = {"rank": {"4": {"hash": "", "seeds": [{"PSNR, dB": 20}] * 3}}}
    monkeypatch.setattr("benchmarks.quality.read_records", lambda: record)
    page = written("<!-- rank -->\n<!-- end -->\ntext\n<!-- pairs -->\n<!-- end -->\n")
    assert page.endswith("\n| 4 | 20.00 |\n<!-- end -->\ntext\n<!-- pairs -->\n<!-- end -->\n")
    assert written(page) == page


@pytest.mark.slow
def test_a_run_of_the_study_trains_and_measures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "WORK", tmp_path)
    pairs.write_pairs()
    common = [one.replace("WORK", str(tmp_path)) for one in runs.COMMON]
    run("train", *common, "trainer.max_steps=1", f"output_dir={tmp_path / 'run'}")
    assert {"psnr", "psnr_staying"} <= rows(tmp_path / "run")[-1].keys()


@pytest.mark.slow
def test_no_figure_is_older_than_its_settings():
    """Compare the recorded hashes with those of the present settings, base and code."""
    records = read_records()
    old = [f"{name}: {label}" for name, section in SECTIONS.items() for label in outdated(section)]
    gone = [f"{name}: {row}" for name in records for row in records[name].keys() - SECTIONS[name].rows.keys()]
    assert not old + gone, (
        f"run python benchmarks/quality.py: not measured with these settings: {', '.join(old + gone)}"
    )


CODE = '''def measure(overrides):
    """Measure."""
    return [len(overrides)]
'''


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        ("conf/adapter/lora.yaml", "dropout: 0.0", "dropout: 0.1", False),
        ("conf/adapter/lora.yaml", "dropout: 0.0", "dropout: 0.0\nnew: null", True),
        ("measure.py", "return [len", "return [1 + len", False),
        ("measure.py", '"""Measure."""', '"""Return figures."""\n    # for a reason', True),
    ],
)
def test_a_row_is_outdated_by_changes_of_its_settings(tmp_path, monkeypatch, file, old, new, same):
    """Neither a new setting that is off nor a comment outdates a row."""
    shutil.copytree(runs.CONF, tmp_path / "conf")
    (tmp_path / "measure.py").write_text(CODE)
    monkeypatch.setattr(runs, "CONF", tmp_path / "conf")

    def row():
        runs._settings.cache_clear()
        spec = importlib.util.spec_from_file_location("benchmarks.measured", tmp_path / "measure.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return runs.Section("name", {"row": []}, module.measure, {}).hash("row")

    before = row()
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    assert (row() == before) is same
    runs._settings.cache_clear()
