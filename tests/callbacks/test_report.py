"""The report of a run and of a sweep: whole in one file, and nothing in it that is not for others to see."""

import base64
import io
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from PIL import Image, ImageChops

from callbacks import report
from callbacks.report import Report
from report.images import data_url, read_strip
from report.quoting import shareable, without_secrets
from tests.support.commands import compose, short
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


def test_page_opens_without_network_shows_its_images_and_names_nothing_of_the_machine(gallery, pairs):
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
    assert "location.reload" not in page.text  # finished: nothing to wait for
    assert page.text.count("Permission is hereby granted") == 2  # as both libraries in it require
    grid = Image.open(folder / "grid.png")
    assert grid.width > grid.height


def test_page_is_written_rarely_enough_to_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    now, written = [1000.0], []

    def write(*_, **__):
        now[0] += 0.5
        written.append(now[0])

    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    module = instantiate(compose("train").model, _convert_="all")
    page = Report(str(tmp_path), "embedded")
    monkeypatch.setattr(page, "_write", write)
    while now[0] < 2000:
        page._renew(None, module)
        now[0] += 1
    assert written[:2] == [1000.5, 1051.0]
    assert 0.5 * len(written) <= 0.01 * 1000 + 0.5


@pytest.mark.slow
def test_page_of_a_running_run_shows_its_current_state(run, tiny, pairs, tmp_path, monkeypatch):
    """The page reloads itself until the end, and the base's image differs from the later ones."""
    pages, write = [], Report._write

    def keep(self, *args, **more):
        write(self, *args, **more)
        pages.append((tmp_path / "run/report.html").read_text())

    monkeypatch.setattr(Report, "_write", keep)
    monkeypatch.setattr(report, "SECONDS_BETWEEN_PAGES", 0.0)
    monkeypatch.setattr(report, "SHARE_OF_TIME", math.inf)
    few = ["model.sampling.num_inference_steps=1", "callbacks.sample_images.count=1", "data.val_count=1"]
    settings = [*short(tiny, pairs, tmp_path / "run", 2, shown=True), *few]
    text = run("train", *settings, "sample_every=0", "trainer.log_every_n_steps=1").text
    assert re.search(rf"report: {tmp_path / 'run/report.html'}, kept up to date", text)
    assert "step 0 of 2" in pages[0]
    assert ">before</figcaption>" in pages[0]
    [page, *_] = (page for page in pages if "step 1 of 2" in page)
    assert ">after step 1</figcaption>" not in page
    for work in ("sampling 1/1", "validating 1/1"):
        assert any(f"step 2 of 2, {work}" in page for page in pages)
    assert json.loads(re.search(r"data-chart='({.*?})'", pages[-1])[1])["lines"][1]["x"] == [1, 2]
    assert ">after step 2</figcaption>" in pages[-1]
    assert ["location.reload" in page for page in pages] == [True] * (len(pages) - 1) + [False]


@pytest.mark.parametrize(
    ("recipe", "sizes"), [("border", [(64, 64)]), (None, [(32, 64)]), (None, [(40, 48)]), ("jpeg", [(64, 64)])]
)
def test_the_printed_command_creates_the_shown_image_whatever_its_size(run, tiny, tmp_path, monkeypatch, recipe, sizes):
    """The target extends its control on all sides, on one, or has its size at most."""
    monkeypatch.chdir(tmp_path)
    make_pairs(Path("pairs"), sizes)
    if recipe:
        shutil.rmtree("pairs/control_images")
    else:
        for path in Path("pairs/training_images").glob("*.png"):
            Image.open(path).resize((64, 64)).save(path)
    made = [f"data.control={recipe}"] if recipe else []
    text = run("train", *short(tiny, "pairs", Path("run"), 1, shown=True), *made, "optimizer.lr=1e-2").text
    command = Page(Path("run/report.html")).blocks[0]
    extends = " width=64 height=64 "
    assert (extends in command, extends in text, extends in Path("run/lora/last/README.md").read_text()) == (
        (recipe != "jpeg",) * 3
    )
    run("predict", *pasted(command)[1:], "output_dir=out")
    [sample], [result] = Path("run/samples/step-000001").glob("*.png"), Path("out").glob("*.png")
    assert np.array_equal(np.asarray(Image.open(result)), np.asarray(read_strip(sample).result))


@pytest.mark.slow
def test_code_for_diffusers_creates_the_image_of_predict(run, tiny, pairs, tmp_path, monkeypatch):
    """Both blocks of the page are run unchanged."""
    monkeypatch.chdir(tmp_path)
    settings = [*short(tiny, pairs, tmp_path / "run", 4, shown=True), *SHOWN]
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
    exec(there.replace(base, str(tiny)), {})
    assert np.abs(np.asarray(Image.open("edited.png")).astype(int) - np.asarray(Image.open(picture))).max() <= 1


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
def test_secrets_and_folders_are_removed_from_reports(text, expected):
    assert without_secrets(text) == expected


def test_values_that_are_named_as_secrets_are_masked():
    settings = {"api_key": "0123", "data": {"root": "/home/a b/c d", "auth": None}, "list": ["/x/y"], "lr": 1e-3}
    assert shareable(settings) == {
        "api_key": "***", "data": {"root": ".../c d", "auth": None}, "list": [".../y"], "lr": 1e-3,
    }  # fmt: skip
