"""The tab Runs: the list, a run, runs compared, and the buttons."""

import json
import os
import re
import time

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from extras.page.runs import Shelf, state_of
from report.images import read_strip
from report.tables import last_metrics, read_metrics
from tests.extras.page.conftest import BASE, write_run


def test_list_shows_each_run_of_outputs_and_of_sweeps_with_its_last_figures(client, outputs):
    text = client.get("/runs").text
    assert re.findall(r'name="run" value="([^"]+)"', text) in (["first", "sweep/0"], ["sweep/0", "first"])
    assert "4 of 4" in text
    assert "8 of 8" in text
    assert "0.125 " in text, "loss of sweep/0's last step"


def test_last_row_of_metrics_is_that_of_the_whole_table(outputs):
    path = outputs / "sweep/0/metrics.csv"
    assert last_metrics(path) == read_metrics(path)[-1]
    with path.open("a") as file:
        file.write("9,0.5,0.")  # a row that is being written
    assert last_metrics(path)["step"] == "8"


def test_images_are_the_parts_of_the_strips(client, outputs, tmp_path):
    strip = read_strip(outputs / "first/samples/step-000004/one.png")
    for part, image in ((0, strip.controls[0]), (1, strip.result), (2, strip.target)):
        answer = client.get("/image", params={"run": "first", "sample": "4/one", "part": part})
        (tmp_path / "x.webp").write_bytes(answer.content)
        assert np.array_equal(np.asarray(Image.open(tmp_path / "x.webp")), np.asarray(image))


def test_compared_runs_have_a_line_each_and_the_settings_that_differ(client, outputs):
    write_run(outputs / "third", 4, "make it snow", optimizer={"lr": 0.1})
    text = client.get("/compare?run=first&run=sweep/0&run=third").text
    chart = json.loads(re.search(r"data-chart='(.*?)'", text)[1])
    assert [line["label"] for line in chart["lines"]] == ["first", "sweep/0", "third"]
    assert (chart["lines"][1]["x"][-1], chart["lines"][1]["y"][-1]) == (8, 0.125)
    rows = re.findall(
        r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text.partition("Settings that differ")[2]
    )
    assert rows == [("optimizer.lr", "0.1", "0.2", "0.1"), ("trainer.max_steps", "4", "8", "4")]
    assert "choose 2 to 6 runs" in client.get("/compare?run=first").text


def test_state_follows_the_files_of_a_run(outputs):
    run = Shelf(outputs).get("first")
    assert state_of(run) == "failed", "it has saved nothing"
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    assert state_of(run) == "stopped"
    (run.path / ".lock").write_text(f" another-host {os.getpid()} {time.time()}")
    assert state_of(run) == "running", "on another machine, which has just written its lock"
    old = time.time() - 1000
    for path in (run.path / ".lock", run.metrics):
        os.utime(path, (old, old))
    assert state_of(run) == "stopped"
    run.finished.write_text("{}")
    assert state_of(run) == "finished"


def test_a_damaged_config_is_shown_and_hides_no_other_run(client, outputs):
    (outputs / "first/config.yaml").write_text("a: [")
    text = client.get("/runs").text
    assert "config.yaml is damaged" in text
    assert "sweep/0" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", ""),
        ("config.yaml", "trainer: null"),
        ("config.yaml", "trainer: {max_steps: '${a.b'}"),
        ("metrics.csv", "step,loss_avg\n1,x\n"),
        ("metrics.csv", "\0\xff"),
        ("validation.csv", "step,val_loss\n1,x\n"),
        ("validation.csv", "step\n1\n"),
        ("samples/step-000004/one.png", ""),
        ("samples/step-000004/other.png", "<script>"),
        (".lock", " nowhere 1e999 x"),
        ("finished.json", "{"),
    ],
)
def test_a_damaged_file_is_named_and_hides_no_other_run(client, outputs, name, content):
    (outputs / "first" / name).write_bytes(content.encode("latin-1"))
    client = TestClient(client.app, BASE, raise_server_exceptions=False, cookies=client.cookies)
    text = client.get("/runs").text
    assert re.findall(r'name="run" value="([^"]+)"', text) in (["first", "sweep/0"], ["sweep/0", "first"])
    for address in ("/run?run=first", "/compare?run=first&run=sweep/0"):
        answer = client.get(address)
        found = re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
        assert answer.status_code == 200 or name in found[1] or "first" in found[1]
        assert answer.headers["content-security-policy"]


def test_a_row_that_is_being_written_is_left_out(client, outputs):
    for name in ("metrics.csv", "validation.csv"):
        with (outputs / "first" / name).open("a") as file:
            file.write("step,val_loss,psnr\n4,0.5,20\n5,0." if name == "validation.csv" else "5,0.")
    answer = client.get("/run?run=first")
    assert answer.status_code == 200
    assert '"x": [4], "y": [0.5]' in answer.text, "the row before"


def test_a_problem_is_shown_below_the_form_which_stays(client, outputs):
    """Else a part that asks for itself again would be empty for good."""
    answer = client.get("/run?run=gone", headers={"hx-request": "true"})
    assert answer.text.startswith("<p")
    assert (answer.status_code, answer.headers["hx-retarget"], answer.headers["hx-reselect"]) == (404, "#message", "p")
    assert "hx-retarget" not in client.get("/run?run=first").headers


def test_while_a_step_is_sampled_the_other_samples_show_their_step_before(client, outputs):
    strip = read_strip(outputs / "first/samples/step-000004/one.png")
    strip.write(outputs / "first/samples/step-000008/two.png")
    text = client.get("/run?run=first").text
    shown = re.findall(r'src="/image\?run=first&amp;sample=(\d)%2F(\w+)&amp;part=1"', text)
    assert shown == [("0", "one"), ("4", "one"), ("0", "one"), ("8", "two")]
    assert "None" not in text.partition("<h2>Curves")[0]
