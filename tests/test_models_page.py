"""docs/models.md is what its command writes, and its memory what the dry run says."""

import json

import pytest
from PIL import Image

from benchmarks.models import MEMORY, MODELS, PAGE, dry_run, page
from tasks.resolvers import CONF


def test_the_page_is_what_the_command_writes():
    assert page(json.loads(MEMORY.read_text())) == PAGE.read_text()


def test_every_model_has_a_row():
    names = {path.stem for path in (CONF / "model").glob("[!_]*.yaml")}
    assert {name for name in names if not name.endswith(("_fp8", "_fp4"))} == {*MODELS, "embedded"}


@pytest.mark.slow
def test_memory_is_that_of_the_dry_run(tmp_path):
    for name in ("training_images", "control_images"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (1024, 1024)).save(tmp_path / name / "a.png")
    (tmp_path / "training_images" / "a.txt").write_text("make it snow")
    recorded = json.loads(MEMORY.read_text())["flux2_klein_4b"]["fp8"]
    assert dry_run("flux2_klein_4b", "fp8", tmp_path) == pytest.approx(recorded, rel=0.02)
