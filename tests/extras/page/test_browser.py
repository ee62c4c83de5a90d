"""The page in a browser, next to real runs."""

import subprocess
import sys

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

from tests.extras.page.browsing import browser_page, studio_at
from tests.extras.page.conftest import write_run
from tests.support.commands import ROOT, weights

RUN = ["trainer.max_steps=300", "sample_every=0", "save_every=0", "callbacks.sample_images.count=1", "data.val_count=2"]
RUN += ["data.resolution=32"]


def train(folder, *settings):
    """Start train.py in a folder, with its small model."""
    command = [sys.executable, str(ROOT / "train.py"), *RUN, *settings]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_run_is_watched_sampled_stopped_and_resumed_in_the_page_and_ends_bitwise_as_without_it(tmp_path):
    run, alone = tmp_path / "outputs/watched", tmp_path / "alone"
    with studio_at(tmp_path) as address, browser_page(address) as page:
        expect = sys.modules["playwright.sync_api"].expect
        expect(page.get_by_role("link", name="start one")).to_be_visible()
        process = train(tmp_path, "output_dir=outputs/watched")
        page.get_by_role("link", name="watched").click()
        charts = page.locator("[data-chart]")
        before = charts.first.get_attribute("data-chart")
        expect(charts.first).not_to_have_attribute("data-chart", before)
        page.get_by_role("button", name="sample now").click()
        slider = page.locator("input.step")
        expect(slider).to_have_attribute("max", "1")  # the base's images and those of now
        images = page.locator("img.result").first
        expect(images).to_have_js_property("complete", True)
        page.get_by_role("button", name="stop after this step").click()
        resume = page.get_by_role("button", name="resume")
        expect(resume).to_be_visible()
        process.wait(60)
        [sampled] = [step for step in (run / "samples").glob("step-*") if step.name != "step-000000"]
        assert sampled.name != "step-000300", "the button came too late"
        stopped = (run / "metrics.csv").read_text().splitlines()
        assert len(stopped) < 300
        resume.click()
        expect(page.locator(".state")).to_have_text("finished")
        expect(page.get_by_text("resuming with the settings of")).to_be_visible()  # the log
    process = train(tmp_path, "output_dir=alone")
    assert process.wait(300) == 0
    there, here = weights(run), weights(alone)
    assert there.keys() == here.keys()
    assert all((there[name] == here[name]).all() for name in here)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"viewport": {"width": 1280, "height": 900}}, id="desktop"),
        pytest.param({"viewport": {"width": 390, "height": 844}, "has_touch": True}, id="phone"),
        pytest.param({"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"}, id="dark"),
    ],
)
def test_every_tab_fits_its_screen_and_works_by_keyboard(tmp_path, options):
    write_run(tmp_path / "outputs/first", 4, "make it snow")
    write_run(tmp_path / "outputs/second", 4, "make it rain")
    with studio_at(tmp_path) as address, browser_page(address, **options) as page:
        for path in ("/runs", "/run?run=first", "/compare?run=first&run=second", "/try", "/data", "/start"):
            page.goto(address.split("/?")[0] + path)
            width = page.locator("html").evaluate("page => page.scrollWidth - page.clientWidth")
            assert width <= 0, path
            found = Axe().run(page).response["violations"]
            serious = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
            assert not serious, path
        page.goto(address.split("/?")[0] + "/run?run=first")
        wipe = page.get_by_role("slider", name="compare with the image before").first
        wipe.click()  # in its middle
        assert page.locator(".wipe").first.evaluate("wipe => wipe.style.getPropertyValue('--at')") == "50%"
        page.keyboard.press("End")
        assert page.locator(".wipe").first.evaluate("wipe => wipe.style.getPropertyValue('--at')") == "100%"
        page.get_by_text("config.yaml").click()
        page.wait_for_timeout(2500)  # the page has asked again
        assert page.locator(".wipe").first.evaluate("wipe => wipe.style.getPropertyValue('--at')") == "100%"
        assert page.locator("details").last.get_attribute("open") is not None
        step = page.locator("input.step")
        step.focus()
        page.keyboard.press("Home")
        assert "sample=0%2Fone" in page.locator("img.result").first.get_attribute("src")


@pytest.mark.slow
def test_own_images_are_uploaded_and_trained_on_with_few_clicks(tmp_path):
    for folder, colour in (("before", "navy"), ("after", "white")):
        (tmp_path / folder).mkdir()
        for name in "abcd":
            Image.new("RGB", (64, 64), colour).save(tmp_path / folder / f"{name}.png")
    clicks = 0

    def click(what):
        nonlocal clicks
        clicks += 1
        what.click()

    with studio_at(tmp_path) as address, browser_page(address, viewport={"width": 1280, "height": 800}) as page:
        click(page.get_by_role("link", name="start one"))
        page.get_by_label("instruction of images").fill("make it white")
        page.get_by_label("before the edit").set_input_files(sorted((tmp_path / "before").iterdir()))
        page.locator("#found .mark").wait_for()  # no targets yet
        page.get_by_label("after it").set_input_files(sorted((tmp_path / "after").iterdir()))
        page.get_by_text("4 samples").wait_for()
        clicks += 4  # of the two file choosers
        assert page.locator("#found figcaption").all_inner_texts() == ["make it white"] * 4
        assert page.locator("#found img").evaluate_all("images => images.length") == 8
        page.get_by_label("steps", exact=True).fill("2")
        page.get_by_text("trainer.max_steps=2").wait_for()
        click(page.get_by_role("button", name="start", exact=True))
        page.wait_for_url("**/run?run=*")
        page.get_by_text("finished").wait_for()
    assert clicks < 10
    [root] = (tmp_path / "uploads").iterdir()
    assert (root / "training_images/a.txt").read_text() == "make it white\n"
    [run] = (path for path in (tmp_path / "outputs").iterdir() if not path.name.startswith("."))
    assert (run / "lora/last/pytorch_lora_weights.safetensors").is_file()
