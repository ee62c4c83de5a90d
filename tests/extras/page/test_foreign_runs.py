"""Runs and a queue that somebody else has written: one line each, nothing is waited for, signalled or overwritten."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from starlette.testclient import TestClient

from extras.page.jobs import Jobs
from extras.page.runs import Shelf
from extras.page.start import asked_by
from foundation.errors import UserError, printable
from foundation.locks import lock_content
from foundation.settings import flat_settings
from runs.run_folder import REQUESTS, RunFolder
from tests.extras.page.conftest import BASE, contents, write_run
from tests.support.commands import wait_until
from tests.support.harm import BILLION_LAUGHS, payload, typed


def strip(widths, size=(48, 16)):
    def write(path):
        facts = PngInfo()
        facts.add_itxt("parts", widths)
        path.unlink(missing_ok=True)
        Image.new("1", size).save(path, pnginfo=facts)

    return write


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def content(text):
    def write(path):
        path.write_bytes(text.encode("latin-1"))

    return write


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        pytest.param("config.yaml", content(BILLION_LAUGHS), id="aliases of aliases"),
        pytest.param("config.yaml", content("trainer: !!python/name:os.system"), id="tag"),
        pytest.param("config.yaml", content("trainer: 5\nhydra: 7\nmodel_name: [1]"), id="types"),
        pytest.param("config.yaml", content("trainer: {max_steps: '${a}${a}'}"), id="several interpolations"),
        pytest.param("config.yaml", content("trainer: {max_steps: '${trainer.max_steps}'}"), id="circle"),
        pytest.param("config.yaml", content("trainer: {max_steps: '${a.b}'}\na: {b: '${trainer}'}"), id="wider circle"),
        pytest.param("config.yaml", content("a: &a [*a]\ntrainer: {max_steps: '${oc.select:a}'}"), id="endless list"),
        pytest.param("config.yaml", content("trainer: {max_steps: " + "[" * 900 + "}"), id="deep"),
        pytest.param("lora/last/pytorch_lora_weights.safetensors", pipe, id="LoRA is a pipe"),
        pytest.param("lora/last/pytorch_lora_weights.safetensors", Path.mkdir, id="LoRA is a folder"),
        pytest.param("metrics.csv", content("step,loss,seconds\n" + "9" * 5000 + ",1,1e308\n"), id="5,000 digits"),
        pytest.param("config.yaml", zeros, id="config.yaml is /dev/zero"),
        pytest.param("samples/step-000004/one.png", pipe, id="image is a pipe"),
        pytest.param("samples/step-000004/one.png", zeros, id="image is /dev/zero"),
        pytest.param("samples/step-000004/one.png", strip("16 16 16", (20_000, 20_000)), id="image of 400 megapixels"),
        pytest.param("samples/step-000004/one.png", strip("1" * 4000), id="width of 4,000 digits"),
        pytest.param("samples/step-000004/one.png", strip("-16 48 16"), id="negative width"),
        pytest.param("samples/step-000004/one.png", strip("16"), id="one part"),
        pytest.param(".lock", pipe, id="lock is a pipe"),
        pytest.param(".lock", zeros, id="lock is /dev/zero"),
        pytest.param("metrics.csv", content("step,loss\n1," + "9" * 200_000), id="long field"),
        pytest.param("metrics.csv", content('step,loss\n"1\n\0'), id="open quote"),
        pytest.param("metrics.csv", content("step,loss,loss_avg,samples_per_second\n1e999,x,inf,\n"), id="figures"),
        pytest.param("validation.csv", content("step,psnr,val_loss\nnan,inf,1e400\n"), id="not finite"),
        pytest.param("metrics.csv", content("step\n" + "1\n" * 300_001), id="many rows"),
        pytest.param("config.yaml", content("trainer: {max_steps: 0x" + "F" * 20_000 + "}"), id="20,000 digits"),
        pytest.param("report.html", content("\xff\xfe\x00"), id="report is not UTF-8"),
    ],
)
def test_harmful_files_are_a_line_and_hide_no_other_run(client, outputs, name, harm):
    write_run(outputs / "bad", 4, "x")
    (outputs / "bad" / name).parent.mkdir(parents=True, exist_ok=True)
    harm(outputs / "bad" / name)
    client = TestClient(client.app, BASE, raise_server_exceptions=True, cookies=client.cookies)
    assert 'href="/run?run=first"' in client.get("/runs").text
    sample = {"run": "bad", "sample": "4/one"}
    addresses = ("/run?run=bad", "/compare?run=first&run=bad", "/report?run=bad", "/start?run=bad", "/try?run=bad")
    addresses += ("/lora?run=bad&which=last",)
    answers = [client.get(address) for address in addresses]
    answers += [client.get("/image", params={**sample, "part": part}) for part in ("all", "0", "1", "99", "x")]
    assert {answer.status_code for answer in answers} <= {200, 400, 404}
    assert client.get("/run?run=first").status_code == 200


def test_a_run_removed_while_the_page_is_open_is_not_found(client, outputs, monkeypatch):
    monkeypatch.setattr(Shelf, "found", lambda *_: ["gone", "first"])
    assert client.get("/runs").status_code == 404
    assert client.get("/run?run=gone").status_code == 404


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "/", "first/", "first/..", "../first", "/etc", "a/b/c", ".queue", "first/samples", "\0", "x\n"],
)
def test_a_name_is_that_of_a_run_or_not_found(client, outputs, name):
    assert client.get("/run", params={"run": name}).status_code == 404


def test_names_that_are_no_text_hide_no_other_run(client, outputs):
    bad = write_run(outputs / "bad", 4, "x")
    for place in ("samples/step-000004/\udcff.png", "lora/\udcff/pytorch_lora_weights.safetensors"):
        (bad.path / place).parent.mkdir(parents=True, exist_ok=True)
        (bad.path / place).write_bytes((bad.samples_of(4) / "one.png").read_bytes())
    for address in ("/runs", "/run?run=bad", "/try", "/compare?run=bad&run=first"):
        assert client.get(address).status_code == 200


@pytest.fixture
def victim():
    """Return a process of another program."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    wait_until(psutil.Process(process.pid).cmdline, process)
    yield process
    process.kill()
    process.wait()


def test_a_forged_lock_signals_no_process_and_does_not_stop_the_queue(client, outputs, victim):
    (outputs / "first/.lock").write_bytes(lock_content(victim.pid))
    answer = client.post("/ask", data={"run": "first", "request": "stop"}, headers={"hx-request": "true"})
    assert (answer.status_code, "does not run" in answer.text) == (400, True)
    assert victim.poll() is None
    assert not Jobs(outputs, lambda: None)._is_busy()


def test_the_output_of_a_command_is_appended_to_no_link(client, outputs, tmp_path):
    """Such as log.txt -> ~/.bashrc in a stopped run from elsewhere."""
    run = write_run(outputs / "bad", 4, "x")
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    (tmp_path / "bashrc").write_text("mine")
    run.log.symlink_to(tmp_path / "bashrc")
    jobs = Jobs(outputs, lambda: None)
    with pytest.raises(Exception, match="is a link"):
        jobs.start(["x=1"], run)
    assert (tmp_path / "bashrc").read_text() == "mine"
    answer = client.post("/resume", data={"run": "bad"}, headers={"hx-request": "true"})
    assert "add trust=true" in answer.text, "the settings of bad were not written by this machine"


def test_a_request_is_written_through_no_link(outputs, tmp_path):
    run, elsewhere = write_run(outputs / "bad", 4, "x"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.requests.symlink_to(elsewhere)
    with pytest.raises(FileNotFoundError):
        run.ask("stop")
    run.requests.unlink()
    run.requests.mkdir()
    (run.requests / "stop").symlink_to(elsewhere / "new")
    with pytest.raises(FileNotFoundError):
        run.ask("stop")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("address", "form", "link", "target"),
    [
        ("/export", {}, "run/export", "elsewhere"),
        ("/export", {}, "run/export", "run/checkpoints"),
        ("/export", {}, "run/export", "outputs/first"),
        ("/export", {}, "run", "elsewhere"),
        ("/note", {"note": "x"}, "run", "elsewhere"),
        ("/note", {"star": "★ "}, "sweep", "elsewhere"),
        ("/note", {"note": "x"}, "run/note.txt", "elsewhere/dangling"),
        ("/ask", {"request": "save"}, "run/requests", "elsewhere"),
        ("/ask", {"request": "save"}, "run/requests/save", "elsewhere/new"),
        ("/ask", {"request": "sample"}, "sweep", "elsewhere"),
        ("/resume", {}, "run/checkpoints", "elsewhere"),
        ("/resume", {}, "run/samples", "elsewhere"),
        ("/resume", {}, "run/samples/step-000008", "elsewhere"),
        ("/resume", {}, "run/lora", "elsewhere"),
        ("/resume", {}, "run/metrics.csv", "elsewhere/file"),
        ("/resume", {}, "run/log.txt", "run/note.txt"),
        ("/resume", {}, "sweep", "elsewhere"),
        ("/rename", {"name": "x"}, "sweep", "elsewhere"),
        ("/delete", {"sure": "yes"}, "sweep", "elsewhere"),
        ("/plan", {"adapter.rank": "4"}, "outputs/.plans", "elsewhere"),
        ("/start", {"when": "next", "output_dir": "new"}, "outputs/.queue", "elsewhere"),
        ("/start", {"when": "now", "output_dir": "new"}, "outputs/new", "elsewhere/dangling"),
    ],
)
def test_the_page_writes_and_deletes_through_no_link(
    client, outputs, tmp_path, monkeypatch, address, form, link, target
):
    """Neither to another place nor to one within the run, wherever on the way the link is."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr("extras.page.runs.state_of", lambda run: "stopped" if address == "/resume" else "running")
    monkeypatch.setattr("extras.page.runs.require_own", lambda config: b"")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").write_text("private")
    write_run(elsewhere / "run", 4, "x")
    bad = write_run(outputs / "bad/run", 4, "x")
    for folder in ("checkpoints", "requests", "lora/last"):
        for run in (bad, RunFolder(elsewhere / "run")):
            (run.path / folder).mkdir(parents=True)
    (bad.path / "lora/last/pytorch_lora_weights.safetensors").touch()
    for path in ("log.txt", "note.txt", "lora/last/pytorch_lora_weights.safetensors"):
        (elsewhere / "run" / path).touch()
    places = {"run": bad.path, "sweep": bad.path.parent, "outputs": outputs, "elsewhere": elsewhere}
    at, to = (places[one.partition("/")[0]].joinpath(*one.split("/")[1:]) for one in (link, target))
    if at.is_dir():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    if link == "run":
        to = elsewhere / "run"
    at.symlink_to(to)
    before = contents(tmp_path)
    answer = client.post(address, data={"run": "bad/run", **form}, headers={"hx-request": "true"})
    assert answer.status_code in (400, 404), answer.text
    assert "is a link" in answer.text or "is not below" in answer.text
    assert not started
    assert contents(tmp_path) == before
    assert not (elsewhere / "dangling").exists()


@pytest.mark.parametrize("request_of", REQUESTS)
def test_requests_are_removed_through_no_link(tmp_path, request_of):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / request_of).touch()
    (tmp_path / "run").mkdir()
    (run := RunFolder(tmp_path / "run")).requests.symlink_to(tmp_path / "elsewhere")
    run.close_requests()
    run.remove_leftovers()
    assert contents(tmp_path).keys() == {tmp_path / "elsewhere" / request_of}


def test_leftovers_are_removed_and_not_what_links_lead_to(tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for name in (".x.1.tmp", "image.png"):
        (elsewhere / name).touch()
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.samples.symlink_to(elsewhere)
    run.checkpoint.parent.symlink_to(elsewhere)
    run.remove_unfinished()
    run.remove_leftovers()
    assert len(contents(elsewhere)) == 2
    assert not os.path.lexists(run.samples)


def test_a_queue_that_somebody_wrote_starts_nothing_and_holds_up_nobody(client, outputs, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(Jobs, "start", lambda self, arguments, run, script="train": started.append(str(run)))
    evil, top = f"data.root={typed(tmp_path / 'marker')}", str(outputs)
    entries = {
        f"{top}/../elsewhere": [f"output_dir={top}/../elsewhere"],
        "/etc/run": ["output_dir=/etc/run"],
        f"{top}/\ud800": [f"output_dir={top}/x"],
        f"{top}/.queue": [f"output_dir={top}/.queue"],
        f"{top}/none": [],
        f"{top}/other": ["output_dir=/elsewhere"],
        f"{top}/evil": [evil, f"output_dir={top}/evil"],
        f"{top}/option": ["-cp=/tmp", f"output_dir={top}/option"],
        f"{top}/resumed": ["ckpt_path=/tmp/x", f"output_dir={top}/resumed"],
        f"{top}/good": ["seed=3", f"output_dir={top}/good"],
    }
    (outputs / ".queue").mkdir()
    (outputs / ".queue/waiting.json").write_text(json.dumps(entries))
    jobs = Jobs(outputs, lambda: None)
    jobs.start_next()
    jobs.start_next()
    assert started == [f"{top}/good"]
    assert jobs.waiting().keys() == jobs.failed.keys() == {*map(printable, entries)} - {f"{top}/good"}
    assert (outputs / ".queue/waiting.json").stat().st_mode & 0o777 == 0o600, "it contains passwords of URLs"


def test_a_run_that_cannot_start_is_shown_with_its_reason_and_may_be_tried_again(client, outputs, monkeypatch):
    (outputs / "file").write_text("x")
    jobs = Jobs(outputs, lambda: None)
    folder = f"{outputs}/file/run"
    with jobs.changing() as waiting:
        waiting[folder] = [f"output_dir={folder}"]
    jobs.start_next()
    assert "Not a directory" in jobs.failed[folder]
    pages = [route for route in client.app.app.routes if route.path == "/start"]
    monkeypatch.setattr(pages[0].endpoint.__self__.jobs, "failed", dict(jobs.failed))
    assert "Not a directory" in client.get("/start").text
    client.post("/queue", data={"run": folder, "change": "first"})
    assert folder not in pages[0].endpoint.__self__.jobs.failed


@pytest.mark.parametrize(
    ("address", "form"),
    [
        ("/start", {"output_dir": "{outputs}/x", "data.root": "{evil}", "when": "now"}),
        ("/start", {"output_dir": "{outputs}/x", "more": "+callbacks.x._target_=os.system", "when": "next"}),
        ("/plan", {"more": "data.root={evil}"}),
        ("/data/open", {"data.root": "{evil}"}),
        ("/data/open", {"data.root": "x", "more": "model={evil}"}),
        ("/data/open", {"data.root": "y", "model": "../../x"}),
        ("/try", {"prompt": "x", "more": "+callbacks.x={evil}"}),
        ("/try", {"prompt": "x", "more": "--config-dir=/a b"}),
        ("/try", {"prompt": "x", "more": "task=clean"}),
        ("/try", {"prompt": "x", "model": "../../evil"}),
    ],
)
def test_forms_name_no_function(client, outputs, tmp_path, address, form):
    values = {"outputs": outputs, "evil": typed(tmp_path / "marker")}
    form = {
        name: text.replace("{outputs}", str(outputs)).replace("{evil}", values["evil"]) for name, text in form.items()
    }
    answer = client.post(address, data=form, headers={"hx-request": "true"})
    assert answer.status_code == 400
    assert "is not accepted here" in answer.text or "there is no such choice" in answer.text
    assert not (outputs / "x").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"notify": "json://host"},
        {"+notify": "json://host"},
        {"++notify": ["json://host"]},
        {"~notify": "json://host"},
        {"notify@data": "json://host"},
        {"seed=1\nnotify": "json://host"},
        {"data": {"prefix": "x\nnotify=json://host"}},
        {"data": {"prefix": "x\u2028notify=json://host"}},
        {"logger": {"wandb": [{"api_key": "json://host"}]}},
        {"seed": {"token": "json://host"}},
        {"data": {"root": [{"path": "x", "+password": "json://host"}]}},
        {"data": {"root": "${run_folder:last}"}},
    ],
    ids=lambda one: str(one).encode("ascii", "backslashreplace").decode()[:40],
)
def test_no_secret_of_a_run_from_elsewhere_travels_by_the_form(client, outputs, tmp_path, monkeypatch, settings):
    """The page posts the form on load, before anybody has asked for anything."""
    monkeypatch.chdir(tmp_path)
    newest = RunFolder(outputs / "first").checkpoint
    newest.parent.mkdir()
    newest.touch()
    before = dict(os.environ)
    choices = {"hydra": {"runtime": {"choices": {"model": "embedded"}}}}
    run = write_run(outputs / "bad", 4, "x", **{**choices, **settings})
    assert "json://" not in client.get("/start?run=bad").text.partition('<section id="queue"')[0]
    with suppress(UserError):
        client.post("/start", data=asked_by(run), headers={"hx-request": "true"})
    lines = [f"{key}={one}" for key, one in flat_settings(settings).items() if isinstance(one, str)]
    for address in ("/start", "/start/form"):
        client.post(address, data={"more": "\n".join(lines)}, headers={"hx-request": "true"})
    assert dict(os.environ) == before


def test_a_request_from_elsewhere_reads_nothing_of_its_query(client, outputs):
    for site in ("cross-site", "same-site"):
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        answer = client.get("/start?run=first", headers=link, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
        assert client.get("/runs", headers=link).status_code == 200
        for more in ({"sec-fetch-dest": "image"}, {"sec-fetch-dest": "iframe"}, {"sec-fetch-dest": "empty"}):
            answer = client.get("/image?run=first&sample=4/one&part=all", headers={**link, **more})
            assert answer.status_code == 403
    headers = client.get("/runs").headers
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"


def test_a_run_from_elsewhere_fills_the_form_and_its_functions_are_named(client, outputs, tmp_path):
    choices = {"hydra": {"runtime": {"choices": {"model": "embedded"}}}}
    write_run(outputs / "bad", 4, "x", data={"root": payload(tmp_path / "marker")}, **choices)
    assert "collect_env" in client.get("/start?run=bad").text, "shown as text"
    form = {"output_dir": f"{outputs}/again", "data.root": typed(tmp_path / "marker")}
    answer = client.post("/start", data=form, headers={"hx-request": "true"})
    assert "data.root._target_" in answer.text
    for model in ("../../x", "/tmp/x", 7, ["embedded", "../x"], {"a": 1}):
        choices = {"hydra": {"runtime": {"choices": {"model": model}}}}
        write_run(outputs / f"of {len(list(outputs.iterdir()))}", 4, "x", **choices)
        name = max(outputs.iterdir(), key=lambda path: path.stat().st_mtime_ns).name
        assert client.get("/start", params={"run": name}).status_code == 400
        assert client.post("/data/open", data={"run": name}).status_code == 400
