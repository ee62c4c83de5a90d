"""benchmarks/gallery.py makes docs/gallery.md."""

import io
import json
import random

import numpy as np
import pytest
from PIL import Image

from benchmarks import gallery
from tests.support.commands import compose, run_here
from tests.support.pictures import photograph


def test_the_page_is_what_the_command_writes():
    records = json.loads(gallery.RECORDS.read_text()) if gallery.RECORDS.is_file() else {}
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert gallery.written(page, records) == page
    assert page.count("not yet run") == len(gallery.EDITS) - len(records)


@pytest.mark.parametrize("edit", gallery.EDITS.values(), ids=gallery.EDITS)
def test_a_rule_makes_the_same_control_of_a_photograph_each_time(edit):
    photo = photograph("coffee", 96, 64)
    one, again = (edit.rule(photo, random.Random("coffee.jpg")) for _ in range(2))
    assert (one.size, one.mode) == (photo.size, "RGB")
    assert one.tobytes() == again.tobytes() != photo.tobytes()
    compose("train", *edit.model, *edit.placement, *gallery.SETTINGS)


def test_photographs_that_name_another_creator_are_not_downloaded(monkeypatch, tmp_path):
    content = io.BytesIO()
    photograph("rocket", 32, 32).save(content, "JPEG")
    own, other = ({"nasa_id": id, "title": "A rocket", "center": "KSC"} for id in ("KSC-1/2", "else"))
    items = [{"data": [own]}, {"data": [other | {"secondary_creator": "Someone"}]}]
    asked = []

    def read(address):
        asked.append(address)
        search = json.dumps({"collection": {"items": items}}).encode()
        return search if address.startswith(gallery.SEARCH) else content.getvalue()

    monkeypatch.setattr(gallery, "_read", read)
    gallery.download(tmp_path)
    assert {path.name for path in tmp_path.glob("*.jpg")} == {"KSC_1_2.jpg"}
    assert sum(address.endswith(".jpg") for address in asked) == 1, "once, though each search finds it"
    assert (tmp_path / "credits.txt").read_text() == "KSC_1_2.jpg: A rocket, NASA KSC (KSC-1/2)\n"


@pytest.mark.slow
def test_an_edit_is_trained_applied_and_shown_and_resumes(tiny, tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(6):
        photograph(("coffee", "astronaut", "chelsea")[number % 3], 48, 32 + number).save(photos / f"{number}.png")
    scripts = []

    def run(command):
        scripts.append(command[1].rpartition("/")[2])
        outcome = run_here(scripts[-1].removesuffix(".py"), *command[2:], *small[scripts[-1]])
        assert outcome.status == 0, outcome.text
        return type("Ended", (), {"returncode": outcome.status})

    small = {
        "train.py": [
            "trainer.accelerator=cpu",
            "data.num_workers=0",
            "logger=none",
            f"data.cache_dir={tmp_path / 'c'}",
        ],
        "predict.py": ["trainer.accelerator=cpu", "num_inference_steps=2"],
    }
    monkeypatch.setattr(gallery.subprocess, "run", run)
    monkeypatch.setitem(gallery.EDITS, "jpeg", gallery.EDITS["jpeg"]._replace(model=("model=flux_kontext",)))
    page = tmp_path / "gallery.md"
    page.write_text("before\n<!-- edits -->\nold\n<!-- end -->\nafter\n")
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model.dtype=float32", "trainer.max_steps=2"]
    settings += ["model.sampling.num_inference_steps=2", "adapter.rank=2"]
    command = ["--edits", "jpeg", "--photos", str(photos), "--output", str(tmp_path / "out"), *settings]
    gallery.main(command, tmp_path / "records.json", page)
    figures = json.loads((tmp_path / "records.json").read_text())["jpeg"]
    assert figures["steps"] == 2
    assert figures["memory"] > 0.1
    text = page.read_text()
    assert f"{figures['minutes']:g} minutes, {figures['memory']:.1f} GB, PSNR {figures['psnr']:.1f} dB" in text
    assert text.count("not yet run") == 4
    assert text.startswith("before\n")
    assert text.endswith("-->\nafter\n")
    grid = Image.open(tmp_path / "gallery_jpeg.jpg")
    assert "](gallery_jpeg.jpg)" in text
    assert np.asarray(grid).std() > 20
    gallery.main(command, tmp_path / "records.json", page)
    assert scripts == ["train.py", "predict.py", "train.py"], "the second train.py reports that it is finished"
    assert page.read_text() == text
