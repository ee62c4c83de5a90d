"""benchmarks/gallery.py makes docs/gallery.md."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from benchmarks import gallery
from datamodules.images.recipes import RECIPES
from report.images import read_strip
from runs.run_folder import RunFolder
from tests.support.commands import compose, run_here
from tests.support.pictures import photograph, records


def test_the_page_is_what_the_command_writes():
    known = json.loads(gallery.RECORDS.read_text()) if gallery.RECORDS.is_file() else {}
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert gallery.written(page, known) == page
    assert page.count("not yet run") == len(gallery.EDITS) - len(known)


@pytest.mark.parametrize("name", gallery.EDITS)
def test_an_edit_is_a_recipe_with_a_model_that_keeps_the_scale_of_its_condition_image(name):
    cfg = compose("train", f"data.control.recipe={name}", *gallery.EDITS[name].split(), *gallery.SETTINGS)
    assert cfg.model.get("vae_image_size") is None
    assert name in RECIPES


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
def test_edits_are_trained_applied_and_shown_and_resume(tiny, tmp_path, monkeypatch):
    (photos := tmp_path / "photos").mkdir()
    for number in range(6):
        photograph(("coffee", "astronaut", "chelsea")[number % 3], 96, 64 + 16 * (number % 2)).save(
            photos / f"{number}.png"
        )
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
    page, out, edits = tmp_path / "gallery.md", tmp_path / "out", ("jpeg", "border")
    for name in edits:
        monkeypatch.setitem(gallery.EDITS, name, "model=flux_kontext")
    page.write_text("before\n<!-- edits -->\nold\n<!-- end -->\nafter\n")
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model.dtype=float32", "trainer.max_steps=2"]
    settings += ["model.sampling.num_inference_steps=2", "adapter.rank=2"]
    command = ["--edits", *edits, "--photos", str(photos), "--output", str(out), *settings]
    gallery.main(command, tmp_path / "records.json", page)
    text, made = page.read_text(), json.loads((tmp_path / "records.json").read_text())
    for name in edits:
        figures = made[name]
        assert figures["steps"] == 2
        assert figures["memory"] > 0.1
        assert f"{figures['minutes']:g} minutes, {figures['memory']:.1f} GB, PSNR {figures['psnr']:.1f} dB" in text
        assert f"](gallery_{name}.jpg)" in text
        assert np.asarray(Image.open(tmp_path / f"gallery_{name}.jpg")).std() > 20
        ran = RunFolder(out / name / "run")
        seen = Image.open(ran.controls()[0])
        assert seen.tobytes() == Image.open(out / name / "held_out-0.png").tobytes(), "as training saw it"
        for number in range(4):
            control, folder = out / name / f"held_out-{number}.png", out / name / f"held_out-{number}"
            strip = read_strip(ran.samples_of(2) / f"{number + 2}.png")
            if name == "jpeg":
                assert strip.controls[0].tobytes() == Image.open(control).tobytes()
            else:
                assert Image.open(control).size != strip.target.size
            for record, scale in zip(records(folder), (0, 1), strict=True):
                assert (record["image"], record["lora_scale"]) == (str(control), scale)
                assert record["prompt"] == RECIPES[name].prompts.split(" | ")[0]
                assert Image.open(folder / record["file"]).size == strip.target.size
    assert text.count("not yet run") == 3
    assert text.startswith("before\n")
    assert text.endswith("-->\nafter\n")
    assert scripts == ["train.py", *["predict.py"] * 4] * 2
    gallery.main(command, tmp_path / "records.json", page)
    assert scripts[10:] == ["train.py"] * 2, "which reports that it is finished"
    assert page.read_text() == text
