"""task=inspect finds what is wrong with a data set, nothing else, and changes nothing."""

import hashlib

import pytest
from PIL import Image

from datamodules.images.samples import Alpha
from extras.inspect import _open
from extras.inspection import Kind
from tests.support.commands import metrics, run_task
from tests.support.faults import picture, save_faults


def content(folder):
    """Return names, checksums and times of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {(path, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_every_fault_is_found_where_it_is_and_nothing_else(tiny, tmp_path):
    root, held_out, output = (tmp_path / name for name in ("data", "held_out", "inspect"))
    planted = save_faults(root, held_out)
    before = content(root), content(held_out)
    settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", "data.resolution=512"]
    folders = [f"data.root={root}", f"data.val_root={held_out}", f"output_dir={output}"]
    text = run_task("inspect", *settings, *folders, f"data.cache_dir={tmp_path / 'cache'}")
    findings = metrics(output, "inspect.csv")
    assert {(row["sample"], row["finding"]) for row in findings} == planted
    assert len(findings) == len(planted)
    assert (content(root), content(held_out)) == before
    figures = {row["sample"]: row["figure"] for row in findings}
    assert figures["shifted"] == "9 px right, 6 px up (2.2 %)"
    assert 1.038 < float(figures["scaled"].removeprefix("x ")) < 1.042
    assert figures["leak"] == "target as learned"
    assert figures["twice_1"] == "as twice_0"
    assert figures["small"] == "240x320, data.resolution=512"
    assert figures["proportion"] == "control 300x384, target 512x384"
    assert findings[0]["finding"] == "leak"
    assert f"{len(planted)} findings in" in text
    assert "1 shifted" in text
    assert all(text.count(f"({kind.remedy})") <= 1 for kind in Kind), "a remedy is told once"
    assert Image.open(output / "inspect.png").width > 1000


def test_images_without_controls_are_also_inspected(repositories, tmp_path):
    root, output = tmp_path / "pictures", tmp_path / "output"
    root.mkdir()
    for name, photo in (("one", "coffee"), ("again", "coffee"), ("other", "rocket")):
        picture(photo).save(root / f"{name}.png")
        (root / f"{name}.txt").write_text(f"a picture called {name}")
    model = ["model=flux_dev", f"model.pretrained_model_name_or_path={repositories['flux_dev']}", "data=captions"]
    settings = [*model, f"data.root={root}", "data.resolution=512", f"output_dir={output}"]
    assert "1 finding in 3 samples: 1 duplicate" in run_task("inspect", *settings)
    (root / "again.png").unlink()
    (root / "again.txt").unlink()
    assert "nothing found in 2 samples" in run_task("inspect", *settings)
    assert not list(output.iterdir()), "what was found before is not left there"


def test_the_sheet_shows_a_mask_as_it_weights_the_loss(tmp_path):
    image = Image.new("RGBA", (64, 48), "black")
    image.putalpha(Image.linear_gradient("L").resize((64, 48)))
    image.save(tmp_path / "x.png")
    for mask in (tmp_path / "x.png", Alpha(tmp_path / "x.png")):
        assert _open(mask, mask=True).resize((64, 48)).getpixel((5, 47))[0] > 240, "black where it is opaque"
    assert _open(tmp_path / "x.png").resize((64, 48)).getpixel((5, 47))[0] < 9
