"""The report of a run and of a sweep: whole in one file, and nothing in it that is not for others to see."""

import base64
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image, ImageChops

from callbacks import report
from callbacks.report import Report
from report.images import data_url, read_strip
from report.quoting import shareable, without_secrets
from tests.support.commands import lora_bytes, short
from tests.support.gallery import SHOWN
from tests.support.pictures import make_pairs
from tests.test_shown import pasted


class Page(HTMLParser):
    """The references and the text of a page."""

    def __init__(self, path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.blocks: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self._in: list[str] = []
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        self._in.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "action", "data", "poster", "srcset"):
                (self.pictures if tag == "img" else self.links).append(value)
        if tag == "pre":
            self.blocks.append("")

    def handle_endtag(self, tag):
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data):
        if "pre" in self._in:
            self.blocks[-1] += data


def decode(url) -> Image.Image:
    head, _, data = url.partition(",")
    assert re.fullmatch(r"data:image/(png|webp);base64", head)
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def same(one, other) -> bool:
    return ImageChops.difference(one, other).getbbox() is None


@pytest.fixture
def settings(tiny, pairs, tmp_path):
    """Overrides of a run that samples two held-out pairs at steps 0, 2 and 4."""
    return [*short(tiny, pairs, tmp_path / "run", 4, shown=True), *SHOWN]


def test_page_opens_without_network_shows_its_pictures_and_names_nothing_of_the_machine(gallery, pairs):
    folder = gallery("shown").folder
    page = Page(folder / "report.html")
    assert page.links == []
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\((?!#)", page.text)
    known = [decode(url) for url in page.pictures]
    for path in sorted((folder / "samples/step-000004").glob("*.png")):
        strip = read_strip(path)
        for part in (*strip.controls, strip.result, strip.target):
            assert any(picture.size == part.size and same(picture, part) for picture in known)
    # Of every step, for the slider.
    for path in sorted((folder / "samples").glob("*/*.png")):
        assert data_url(read_strip(path).result) in page.text
    words = re.sub(r"data:image/[^\"]+", "", page.text)
    for word in (str(folder), str(pairs), "/tmp", "hf_abc", folder.parent.name):
        assert word not in words
    assert "validation loss" in page.text
    assert "mirror picture" in page.text
    assert "setTimeout" not in page.text  # finished: nothing to wait for
    grid = Image.open(folder / "grid.png")
    assert grid.width > grid.height


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Return all pages that a run writes."""
    found = []
    write = Report._write

    def keep(self, *args, **more):
        write(self, *args, **more)
        found.append((tmp_path / "run/report.html").read_text())

    monkeypatch.setattr(Report, "_write", keep)
    return found


def test_page_of_a_running_run_says_what_is_known_now(run, tmp_path, settings, pages, monkeypatch):
    """At each step that is written, while pictures are made, too; the base's picture is not what came after."""
    monkeypatch.setattr(report, "SECONDS_BETWEEN_PAGES", 0.0)
    decoded = Counter()
    monkeypatch.setattr(report, "read_strip", lambda path: decoded.update([path]) or read_strip(path))
    text = run("train", *settings, "sample_every=0", "trainer.log_every_n_steps=1").text
    assert re.search(rf"report +{tmp_path / 'run/report.html'}, kept up to date", text)
    assert "step 0 of 4" in pages[0]
    assert ">before</figcaption>" in pages[0]
    assert ">after</figcaption>" not in pages[0]
    for step in (1, 2, 3):
        [page, *_] = (page for page in pages if f"step {step} of 4" in page)
        assert len(json.loads(re.search(r"curves = (\[.*\])", page)[1])[0]["lines"][1]["points"]) >= step - 1
        assert ">after</figcaption>" not in page
    assert any("step 4 of 4, sampling 2/2" in page for page in pages)
    assert any("step 4 of 4, validating 1/2" in page for page in pages)
    assert ">after</figcaption>" in pages[-1]
    assert max(decoded.values()) == 1, "however many pages are written"
    assert len(pages) > 20


@pytest.mark.slow
def test_page_is_there_from_the_start_and_reloads_itself_until_the_end(run, tmp_path, settings, pages):
    run("train", *settings)
    assert ["setTimeout" in page for page in pages] == [True, False]
    assert "step 0 of 4" in pages[0]
    # Killed behind the last saving.
    (tmp_path / "run/report.html").write_text(pages[0])
    grid = (tmp_path / "run/grid.png").read_bytes()
    (tmp_path / "run/grid.png").unlink()
    outcome = run("train", *settings, "ckpt_path=last")
    assert "nothing to do" in outcome.text
    assert pages[-1] == pages[1]
    assert (tmp_path / "run/grid.png").read_bytes() == grid


@pytest.mark.slow
def test_code_for_diffusers_gives_the_picture_of_predict(run, pairs, tmp_path, settings, monkeypatch):
    """Both blocks of the page are run unchanged."""
    monkeypatch.chdir(tmp_path)
    relative = [one for one in settings if not one.startswith("output_dir")]
    outcome = run("train", *relative, "output_dir=it's a run", "optimizer.lr=3e-2", "model.sampling.shift=2")
    here, there = Page(tmp_path / "it's a run/report.html").blocks[:2]
    script, *overrides = pasted(here)
    assert script == "predict.py"
    printed = re.search("try it: (.*)", outcome.text)[1]
    photo = "image=it's a run/samples/control.png"
    assert pasted(printed) == ["predict.py", "lora=it's a run", photo, "prompt=mirror picture 3"]
    run("predict", *overrides, "output_dir=out")
    [picture] = (tmp_path / "out").glob("*.png")
    base = re.search(r"from_pretrained\('([^']+)'", there)[1]
    tiny = next(one.partition("=")[2] for one in settings if "pretrained_model" in one)
    exec(there.replace(base, tiny), {})
    assert np.abs(np.asarray(Image.open("edited.png")).astype(int) - np.asarray(Image.open(picture))).max() <= 1


@pytest.mark.slow
def test_pictures_of_any_shape_and_name_and_damaged_ones_cost_no_run(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    for number, size in enumerate([(20000, 16), (16, 20000)]):
        Image.effect_noise(size, 50).convert("RGB").save(root / f"control_images/{number:02d}.png")
    for kind in ("control_images/02.png", "training_images/02.png", "training_images/02.txt"):
        (root / kind).rename((root / kind).with_stem("x" * 245))
    common = short(tiny, root, tmp_path / "run", 1, shown=True)
    common += ["model.sampling.num_inference_steps=1", "data.cache_dir=null"]
    outcome = run("train", *common)
    assert "note: no" not in outcome.text
    page = Page(tmp_path / "run/report.html")
    assert all(1 <= min(decode(url).size) <= max(decode(url).size) <= 512 for url in page.pictures)
    grid = Image.open(tmp_path / "run/grid.png")
    assert max(grid.size) < 3000
    # In both folders: of the wide control, the tall one, the long name and the last.
    assert len(strips := list((tmp_path / "run/samples").glob("*/*.png"))) == 8
    assert all(32 <= min(Image.open(path).size) <= max(Image.open(path).size) <= 256 for path in strips)

    before = lora_bytes(tmp_path / "run")
    broken = tmp_path / "again/samples/step-000000/a.png"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no picture")
    outcome = run("train", *common, f"output_dir={tmp_path / 'again'}")
    assert "note: no report: cannot identify image file" in outcome.text
    assert (tmp_path / "again/grid.png").is_file(), "it shows samples of the last step only"
    assert lora_bytes(tmp_path / "again") == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root: /home/ann/pairs", "root: .../pairs"),
        (r"root: C:\Users\ann\pairs", "root: .../pairs"),
        ("token: hf_AbCdEfGhIjKlMnOp", "token: ***"),
        ("shards: https://ann:secret@host/x.tar", "shards: https://***@host/x.tar"),
        ("shards: s3://bucket/folder", "shards: s3://bucket/folder"),
        ("shards: https://host/x.tar?X-Amz-Signature=abc", "shards: https://host/x.tar?***"),
        ("name: black-forest-labs/FLUX.1-Kontext-dev", "name: black-forest-labs/FLUX.1-Kontext-dev"),
        ("/Users/Ann Lee/Pictures/my pairs", ".../my pairs"),
        ("shards: file:///home/ann/pairs.tar", "shards: file://.../pairs.tar"),
        ("root: ~ann/private/pairs", "root: .../pairs"),
        ("root: ${data.cache_dir}/shapes/x", "root: ${data.cache_dir}/shapes/x"),
    ],
)
def test_secrets_and_folders_are_left_out(text, expected):
    assert without_secrets(text) == expected


def test_values_that_are_named_as_secrets_are_masked():
    settings = {"api_key": "0123", "data": {"root": "/home/a b/c d", "auth": None}, "list": ["/x/y"], "lr": 1e-3}
    assert shareable(settings) == {
        "api_key": "***", "data": {"root": ".../c d", "auth": None}, "list": [".../y"], "lr": 1e-3,
    }  # fmt: skip
