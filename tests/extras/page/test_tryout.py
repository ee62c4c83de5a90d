"""The tab Try: a model that stays loaded, and the commands that the page shows."""

import html
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from io import BytesIO

import numpy as np
import psutil
import pytest
import safetensors.torch
from hydra.utils import instantiate
from PIL import Image
from starlette.testclient import TestClient

from extras.page.app import create_app
from extras.page.jobs import Jobs
from extras.page.runs import Shelf
from extras.page.tryout import TryPage
from foundation.errors import UserError
from lightning_modules.lora_files.reading import HEADER_KEY, WEIGHTS_NAME
from lightning_modules.pretrained.frozen_base import FrozenBase
from runs.run_folder import RunFolder
from tasks.edit import KEPT
from tests.extras.page.browsing import browser_page, studio_at
from tests.support.commands import compose
from tests.support.pictures import photograph
from tests.support.tiny_adapters import export, learn

ADAPTERS = {
    "a": (0.1, "lora"),
    "b": (-0.1, "lora"),
    "t": (0.1, "tlora"),
    "d": (0.1, "dora"),
    "k": (0.3, "lokr"),
}


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Return adapters of the embedded model that have learned, by name."""
    folder = tmp_path_factory.mktemp("loras")
    for name, (spread, adapter) in ADAPTERS.items():
        module = instantiate(compose("train", "model=embedded", f"adapter={adapter}").model, _convert_="all")
        module.configure_model()
        learn(module, spread)
        export(module, folder / name / WEIGHTS_NAME)
    return folder


@pytest.fixture
def photo(tmp_path):
    """Return the path of an image large enough for the embedded model, so that no note says otherwise."""
    photograph("coffee", 192, 128).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def images(folder):
    """Return the pixels of all images of a prediction by name."""
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


@pytest.mark.slow
def test_kept_model_creates_the_images_of_a_fresh_one_after_any_lora(run, loras, photo, tmp_path, monkeypatch):
    """Base, LoRA at two strengths, a mix of LoRA, LoKr and T-LoRA, DoRA, and the first two again."""
    loads, load = [], FrozenBase.load_transformer
    monkeypatch.setattr(FrozenBase, "load_transformer", lambda base: loads.append(base) or load(base))
    mix = [f"lora=[{loras / 'a'},{loras / 'k'},{loras / 't'}]", "lora_weights=[1,0.3,0.5]"]
    requests = [["seed=3"], [f"lora={loras / 'a'}", "lora_scale=[0.5,1]"], mix]
    requests += [[f"lora={loras / 'd'}"]]
    common = [f"image={photo}", "prompt=make it snow", "num_inference_steps=2"]
    fresh, kept = [], []
    for number, request in enumerate(requests):
        run("predict", *common, *request, f"output_dir={tmp_path / f'fresh-{number}'}")
        fresh.append(images(tmp_path / f"fresh-{number}"))
    assert len({one.tobytes() for found in fresh for one in found.values()}) == len(requests) + 1
    loads.clear()
    token = KEPT.set({})
    try:
        for number, request in enumerate([*requests, *requests[:2]]):
            run("predict", *common, *request, f"output_dir={tmp_path / f'kept-{number}'}")
            kept.append(images(tmp_path / f"kept-{number}"))
            np.testing.assert_equal(kept[-1], fresh[number % len(requests)])
        assert len(loads) == 1
        run("predict", *common, "model.dtype=bfloat16", f"output_dir={tmp_path / 'other'}")
        assert len(loads) == 2
    finally:
        KEPT.reset(token)


class Tab:
    """The tab, by requests."""

    def __init__(self) -> None:
        self.client = TestClient(create_app("t"), base_url="http://127.0.0.1")
        self.client.get("/?token=t")
        self.text = ""

    def create(self, image=b"", loras=(), until=None, **form):
        """Ask for images of some LoRAs, each with its strength, and wait."""
        chosen = [*loras, *[("", "1")] * (4 - len(loras))]
        form |= {"lora": [str(lora) for lora, _ in chosen], "weight": [weight for _, weight in chosen]}
        self.text = self.client.post("/try", data=form, files=[("image", ("<b>.png", image))]).text
        self.wait(until)

    def wait(self, words):
        """Wait for words of the progress, and at most until nothing is left to do."""
        end = time.monotonic() + 120
        while "<button>cancel" in self.text and (words is None or words not in self.text):
            assert time.monotonic() < end, self.text
            time.sleep(0.1)
            self.text = self.client.get("/try").text

    def stop(self, **form):
        self.text = self.client.post("/try/stop", data=form or {"memory": ""}).text
        self.wait(None)

    def rows(self):
        """Return each command's arguments, and the addresses of its images."""
        parts = re.findall(
            r'<div class="thumbs">(.*?)</div>\s*<pre>python predict.py (.*?)</pre>', self.text, re.DOTALL
        )
        return [(shlex.split(html.unescape(line)), re.findall('src="(.*?)"', images)) for images, line in parts]

    def marks(self):
        """Return the notes and errors."""
        return re.findall('role="alert">(.*?)</p>', self.text)


@pytest.fixture
def tab():
    tab = Tab()
    yield tab
    tab.stop(memory="1")


@pytest.mark.slow
def test_page_shows_the_commands_that_create_its_images(tab, run, loras, photo, tmp_path):
    form = {"prompt": "make it snow, please", "num_inference_steps": "2", "lora_scale": "0.5, 1", "seed": "3 4"}
    chosen, made = [(loras / "a", "1"), (loras / "t", "0.5")], []
    for more in ({}, {"each": "1", "more": "max_area=20000"}):
        tab.create(photo.read_bytes(), chosen, **form, **more)
        assert tab.marks() == []
        made += [(row, [tab.client.get(html.unescape(one)).content for one in found]) for row, found in tab.rows()]
    assert len(made) == 3, "both LoRAs together, and each in a row"
    for number, (arguments, found) in enumerate(made):
        run("predict", *arguments, f"output_dir={tmp_path / str(number)}")
        assert found[0] == photo.read_bytes()
        there = {np.asarray(Image.open(BytesIO(one))).tobytes() for one in found[1:]}
        assert there == {one.tobytes() for one in images(tmp_path / str(number)).values()}
        assert len(there) == 4


@pytest.mark.slow
def test_cancelled_commands_leave_the_model_and_freeing_ends_its_process(tab, photo):
    form = {"image": photo.read_bytes(), "prompt": "x"}
    others = set(psutil.Process().children())  # ended ones of other tests
    tab.create(**form, until="denoising step", num_inference_steps="5000")
    assert "other images are being created" in tab.client.post("/try", data={"prompt": "x"}).text
    [process] = set(psutil.Process().children()) - others
    tab.stop()
    assert tab.marks() == ["stopped by SIGINT"]
    tab.create(**form, num_inference_steps="1")
    assert tab.marks() == []
    assert len(tab.rows()[0][1]) == 2
    assert set(psutil.Process().children()) - others == {process}
    tab.create(**form, until="denoising step", num_inference_steps="5000")
    tab.stop(memory="1")
    assert not process.is_running()
    assert "free the memory" not in tab.text
    tab.create(**form, num_inference_steps="1")
    assert len(tab.rows()[0][1]) == 2


@pytest.mark.slow
def test_mistakes_are_a_line_and_headers_and_names_are_text(tab, loras, photo, tmp_path):
    tensors = safetensors.torch.load_file(loras / "a" / WEIGHTS_NAME)
    header = {"base": "<script>alert(1)</script>", "adapter": {}, "base_precision": "<b>"}
    safetensors.torch.save_file(tensors, tmp_path / "<i>.safetensors", {HEADER_KEY: json.dumps(header)})
    form = {"prompt": "<u>x</u>", "num_inference_steps": "1"}
    tab.create(photo.read_bytes(), [(tmp_path / "<i>.safetensors", "1")], **form)
    assert any("was trained on base &lt;script&gt;" in mark for mark in tab.marks())
    assert not re.search("<(script>|u>)|<i>(?!compare</i>)", tab.text)
    for mistake, words in (
        ({"image": b"<html><script>"}, "it is empty or no image"),
        ({"loras": [("nobody/missing", "1")]}, "nobody/missing is not a folder here"),
        ({"loras": [(loras / "a", "strong")]}, "strong"),
        ({"seed": "1, x"}, "seed"),
        ({"more": "colour=red"}, "colour"),
        ({"more": "--multirun"}, "is not accepted here"),
    ):
        tab.create(**{"image": photo.read_bytes(), **form, **mistake})
        [mark] = tab.marks()
        assert words in mark
        assert "Traceback" not in tab.text


def test_a_run_that_starts_gets_the_memory_and_an_inspection_or_a_refused_start_ends_no_prediction(tmp_path):
    freed, run = [], RunFolder(tmp_path / "run")
    jobs = Jobs(tmp_path, lambda: freed.append(True))
    jobs.start(["task=inspect", f"output_dir={tmp_path}", "--version"], RunFolder(tmp_path / "inspect"), "predict")
    assert not freed
    jobs.start(["--version"], run)
    assert len(freed) == 1
    with pytest.raises(UserError, match="is in use by another command"):
        jobs.start(["--version"], run)
    run = RunFolder(tmp_path / "linked")
    run.path.mkdir()
    run.log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        jobs.start(["--version"], run)
    assert len(freed) == 1


def test_folders_of_killed_pages_are_removed_with_or_without_a_lock_and_those_of_living_ones_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        locks = {
            "none": None,
            "empty": b"",
            "damaged": b" x y",
            "stale": f" {platform.node()} {ended.pid} 1.0".encode(),
        }
        for pid in (living.pid, ended.pid, os.getpid()):  # containers number their processes alike
            for name, lock in locks.items():
                (folder := tmp_path / f"retouch-try-{pid}-{name}").mkdir()
                if lock is not None:
                    (folder / ".lock").write_bytes(lock)
        page = TryPage(Shelf(tmp_path / "outputs"))
        kept = {path.name for path in tmp_path.iterdir()} - {page._folder.name}
        assert kept == {f"retouch-try-{living.pid}-{name}" for name in locks}
        living.communicate(b"\n")


def test_only_images_of_the_tab_are_read(tab, tmp_path):
    (tmp_path / "secret.png").write_text("secret")
    for name in (str(tmp_path / "secret.png"), f"../{tmp_path.name}/secret.png", "output.txt", "..", ""):
        assert tab.client.get("/try/image", params={"name": name}).status_code == 404
    assert tab.client.post("/try", content=b"", headers={"content-length": str(2**30)}).status_code == 413


@pytest.mark.slow
def test_two_images_are_chosen_and_wiped_on_a_phone(run, loras, photo, tmp_path, monkeypatch):
    (tmp_path / "outputs/one/lora").mkdir(parents=True)
    shutil.copytree(loras / "a", tmp_path / "outputs/one/lora/last")
    (tmp_path / "outputs/one/config.yaml").write_text("model_name: embedded\n")
    with studio_at(tmp_path) as address, browser_page(address, viewport={"width": 390, "height": 844}) as page:
        expect = sys.modules["playwright.sync_api"].expect
        page.goto(address.split("?")[0] + "run?run=one")
        page.get_by_role("link", name="try it").click()
        expect(page.get_by_label("LoRA 1")).to_have_value("outputs/one")
        page.get_by_label("image to edit").set_input_files(photo)
        page.get_by_label("instruction").fill("make it snow")
        page.get_by_label("num_inference_steps").fill("2")
        page.get_by_label("lora_scale").fill("0, 1")
        page.get_by_role("button", name="create").click()
        expect(page.get_by_role("button", name="cancel")).to_be_visible()
        expect(page.get_by_role("button", name=photo.name)).to_be_visible()
        expect(page.get_by_role("button", name="cancel")).to_be_hidden()
        results = page.get_by_role("button", name="strength")
        expect(results).to_have_count(2)
        results.nth(0).click()
        page.get_by_role("button", name="compare").click()
        page.keyboard.press("ArrowRight")
        large = page.locator(".pswp__item[aria-hidden=false] .wipe")
        before = large.screenshot()
        page.get_by_role("slider", name="compare").press("End")
        assert large.screenshot() != before
        page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        image = results.nth(1).locator("img").get_attribute("src")
        content = page.request.get(page.url.split("/try")[0] + image).body()
        command = shlex.split(page.locator("pre").inner_text())
        monkeypatch.chdir(tmp_path)
        run("predict", *command[2:], "output_dir=alone")
    _, expected = images(tmp_path / "alone").values()
    assert np.array_equal(np.asarray(Image.open(BytesIO(content))), expected)
