"""Curves and large images in a browser: on the page while a run goes on, on a comparison, and in report.html."""

import csv

import pytest
from PIL import Image

from report.images import Strip, compared_rows, data_url, read_strip, sample_files, sample_rows
from report.page import render
from report.tables import curves, read_metrics, read_validation
from tests.extras.page.browsing import PATIENCE, browser_page, chromium, studio_at
from tests.extras.page.conftest import write_run

SCALE = "place => [place.plot.scales.x.min, place.plot.scales.x.max, place.plot.scales.y.distr]"


def written(run, losses, start=1):
    """Append rows to a run's metrics.csv."""
    with run.metrics.open("a", newline="") as file:
        csv.writer(file).writerows([[step, loss, loss, 2.0, 1.0, step] for step, loss in enumerate(losses, start)])


def zoom(page, chart):
    """Drag over the middle half of a chart."""
    box = chart.locator(".u-over").bounding_box()
    for part, press in ((0.25, page.mouse.down), (0.75, page.mouse.up)):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + 40, steps=4)
        press()


@pytest.mark.slow
def test_curves_show_values_under_the_pointer_and_keep_zoom_smoothing_and_scale_when_the_run_goes_on(tmp_path):
    run = write_run(tmp_path / "outputs/first", 40, "make it snow")
    with studio_at(tmp_path) as address, browser_page(address) as page:
        page.goto(address.split("/?")[0] + "/run?run=first")
        chart = page.locator("[data-chart]").first
        chart.locator(".u-over").hover()
        step, loss, average = (float(text) for text in chart.locator(".u-value").all_text_contents())
        assert 15 < step < 26
        assert loss == average == pytest.approx(1 / step, 1e-3)
        zoom(page, chart)
        page.get_by_label("log scale").check()
        page.get_by_label("smoothing").fill("0.9")
        low, high, distribution = chart.evaluate(SCALE)
        assert 5 < low < 16
        assert 25 < high < 36
        assert distribution == 3
        weights = [0.9 ** (40 - step) for step in range(1, 41)]
        expected = sum(weight / step for step, weight in enumerate(weights, 1)) / sum(weights)  # as TensorBoard's
        assert chart.evaluate("place => place.plot.data[2].at(-1)") == pytest.approx(expected)
        written(run, [0.02] * 10, 41)
        longer = "() => document.querySelector('[data-chart]').plot.data[0].length === 50"
        page.wait_for_function(longer, timeout=PATIENCE)
        assert chart.evaluate(SCALE) == [low, high, 3]
        assert page.get_by_label("smoothing").input_value() == "0.9"
        chart.locator(".u-over").dblclick()
        assert chart.evaluate(SCALE) == [1, 50, 3]
        page.get_by_text("values").first.click()
        assert "40\t0.025\n" in page.get_by_role("table", name="average").inner_text()


@pytest.mark.slow
def test_a_diverged_run_leaves_the_other_readable_and_their_images_are_side_by_side(tmp_path):
    for name, loss in (("calm", 0.5), ("diverged", 1e4)):
        written(write_run(tmp_path / "outputs" / name, 4, "make it snow"), [loss] * 90, 5)
    with studio_at(tmp_path) as address, browser_page(address) as page:
        page.goto(address.split("/?")[0] + "/compare?run=calm&run=diverged")
        chart, most = page.locator("[data-chart]").first, "place => place.plot.scales.y.max"
        assert 1 <= chart.evaluate(most) < 2
        page.get_by_label("whole range").check()
        assert chart.evaluate(most) >= 1e4
        captions = page.locator(".samples .row figcaption").all_text_contents()
        assert captions == ["control", "calm, step 4", "diverged, step 4", "target"]


@pytest.mark.slow
def test_an_image_opens_in_large_by_keys_is_wiped_over_the_one_before_and_over_any_other(tmp_path):
    write_run(tmp_path / "outputs/first", 4, "make it snow")
    with studio_at(tmp_path) as address, browser_page(address) as page:
        page.goto(address.split("/?")[0] + "/run?run=first")
        page.get_by_role("button", name="enlarge").press("Enter")
        box = page.get_by_role("dialog")
        shown = box.locator(".pswp__item[aria-hidden=false]")
        assert box.locator(".pswp__words p").text_content() == "after step 4: make it snow"
        wipe = box.get_by_role("slider", name="compare")
        wipe.press("End")  # the slider takes it, not the row of images
        clip = "image => getComputedStyle(image).clipPath"
        assert shown.locator(".wipe .over").evaluate(clip) == "inset(0px 0% 0px 0px)"
        wipe.press("Home")
        assert shown.locator(".wipe .over").evaluate(clip) == "inset(0px 100% 0px 0px)"
        assert shown.locator("img").first.bounding_box()["height"] > 500, "16 pixels fill the window"
        assert shown.locator("img").first.evaluate("image => getComputedStyle(image).imageRendering") == "pixelated"
        wipe.blur()
        page.keyboard.press("ArrowRight")
        assert box.locator(".pswp__words p").text_content() == "target: make it snow"
        assert not wipe.is_visible()
        box.get_by_role("button", name="compare").click()
        page.keyboard.press("ArrowLeft")
        assert "part=2" in shown.locator(".over").get_attribute("src"), "the target"
        page.keyboard.press("Escape")
        box.wait_for(state="detached")
        assert page.get_by_role("button", name="enlarge").evaluate("button => button === document.activeElement")


@pytest.mark.slow
@pytest.mark.parametrize("sandboxed", [False, True])
def test_report_draws_curves_and_opens_images_from_one_file(tmp_path, sandboxed):
    run = write_run(tmp_path / "outputs/first", 40, "make it snow")
    rows = sample_rows(files := sample_files(run), lambda path, part: data_url(read_strip(path).parts[part]))
    charts = curves(read_metrics(run.metrics), read_validation(run.validation))
    render(run.report, title="first", rows=rows, steps=sorted(files), curves=charts, images_title="Held-out images")
    with studio_at(tmp_path) as address, chromium() as page:
        errors = []
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_url("**/runs")
        page.goto(address.split("/?")[0] + "/report?run=first" if sandboxed else run.report.as_uri())
        page.locator(".u-over").hover()
        assert page.locator(".u-value").first.text_content() in map(str, range(15, 26))
        page.locator(".full").first.press("Enter")
        assert page.get_by_role("dialog").locator("p").text_content() == "control: make it snow"
        assert not errors


def test_rows_of_compared_runs_show_each_run_at_its_last_step_before(tmp_path):
    runs = {}
    for name, steps in (("a", (0, 10, 20)), ("b", (0, 15))):
        for step in steps:
            path = tmp_path / name / f"{step}" / "one.png"
            path.parent.mkdir(parents=True)
            Strip([], Image.new("RGB", (8, 8)), None, "snow").write(path)
        files = {step: {"one": tmp_path / name / f"{step}" / "one.png"} for step in steps}
        runs[name] = (list(steps), sample_rows(files, lambda path, part: path.parts[-2]))
    runs["c"] = ([0], [])
    steps, [row] = compared_rows(runs)
    assert steps == [0, 10, 15, 20]
    assert [[caption for _, caption in column] for column in row["columns"]] == [
        ["a, step 0", "a, step 10", "a, step 10", "a, step 20"],
        ["b, step 0", "b, step 0", "b, step 15", "b, step 15"],
        [],
    ]
