"""The commands and the page on a Windows that Linux plays; see support/windows."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html import unescape
from urllib.parse import urlencode, urlsplit

import psutil
import pytest

from foundation.locks import holder
from runs.run_folder import RunFolder
from tests.extras.page.browsing import studio
from tests.extras.page.test_server import opened
from tests.support.commands import ROOT, metrics, short
from tests.support.pictures import make_pairs

WINDOWS = ROOT / "tests" / "support" / "windows"
PATHS = {"PYTHONPATH": f"{WINDOWS}{os.pathsep}{ROOT}"}
FEW = ["trainer.accelerator=cpu", "data.resolution=32", "data.val_root=null", "data.val_count=1"]
FEW += ["model.sampling.num_inference_steps=1"]
PACKAGES = ("callbacks", "cli", "datamodules", "extras", "foundation", "lightning_modules", "report", "runs", "tasks")
FILES = [*ROOT.glob("*.py"), *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]


def on_windows(folder, script, *settings):
    """Return the output of a command that must end well."""
    command = [sys.executable, ROOT / f"{script}.py", *settings]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **PATHS}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def seen_by_us(folder, code):
    """Return the output of code that counts as a file of Retouch."""
    command = f"import os; exec(compile({code!r}, '{ROOT}/train.py', 'exec'), {{'__file__': '{ROOT}/train.py'}})"
    environment = {**os.environ, **PATHS}
    return subprocess.check_output([sys.executable, "-c", command], cwd=folder, env=environment, text=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return a folder in which the first command of the README has trained on cached samples, and its output."""
    folder = tmp_path_factory.mktemp("windows")
    text = on_windows(folder, "train", *FEW, "trainer.max_steps=2", "output_dir=outputs/one")
    return folder, text


def test_files_of_retouch_find_no_name_of_unix_and_paths_with_backslashes(tmp_path):
    names = "os.pread os.fork os.getuid os.fchmod os.O_NOFOLLOW os.statvfs os.sched_getaffinity os.setsid os.WNOHANG "
    names += "signal.SIGUSR1 signal.SIGKILL signal.SIGHUP signal.pthread_kill signal.alarm socket.AF_UNIX"
    lines = [f"print(hasattr({name.partition('.')[0]}, '{name.partition('.')[2]}'))" for name in names.split()]
    lines += ["from pathlib import Path", "print(Path('a') / 'b', os.path.join('a', 'b'))"]
    lines += ["try:", " import fcntl", "except ImportError:", " print('gone')"]
    text = seen_by_us(tmp_path, "\n".join(["import os, signal, socket", *lines]))
    assert text.splitlines() == [*["False"] * len(names.split()), r"a\b a\b", "gone"]


@pytest.mark.slow
def test_first_command_trains_on_cached_samples_and_is_resumed_and_edits(first, tmp_path):
    folder, text = first
    assert "\ndone: outputs\\one\\lora\\last\n" in text, "this is not Windows"
    for name in ("outputs", "cache"):
        shutil.copytree(folder / name, tmp_path / name)
    on_windows(tmp_path, "train", "output_dir=outputs/one", "ckpt_path=last", "trainer.max_steps=3")
    assert [row["step"] for row in metrics(tmp_path / "outputs/one")] == ["1", "2", "3"]
    photo = r"image=outputs\one\samples\control.png"
    on_windows(tmp_path, "predict", r"lora=outputs\one", photo, "prompt=make it snow", "output_dir=edited")
    assert [path.suffix for path in sorted((tmp_path / "edited").iterdir())] == [".png", ".jsonl"]


@pytest.mark.slow
def test_run_trains_samples_and_validates_on_pairs_with_spawned_workers(tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    settings = [*short(tiny, root, tmp_path / "run", 2, "pairs", shown=True), "data.num_workers=2", "data.val_count=1"]
    more = ["model=flux_kontext", "save_every=1", "+callbacks.windows={_target_: sitecustomize.lightning_too}"]
    text = on_windows(tmp_path, "train", *settings, *more)
    assert "\ndone: run\\lora\\last\n" in text, "this is not Windows"
    for name in ("report.html", "lora/last/README.md", "checkpoints/last.ckpt", "finished.json"):
        assert (tmp_path / "run" / name).is_file(), text


class Page:
    """The page, as a browser with its cookie sees it."""

    def __init__(self, address):
        self.client, self.place = opened(address), address.partition("/?")[0]

    def get(self, path, **query):
        return self.client.open(f"{self.place}{path}?{urlencode(query)}", timeout=60).read()

    def post(self, path, **form):
        return self.client.open(self.place + path, urlencode(form).encode(), timeout=60).read().decode()

    def wait(self, words, path, **query):
        end = time.monotonic() + 90
        while words not in (text := unescape(self.get(path, **query).decode())):
            assert time.monotonic() < end, text
            time.sleep(0.1)
        return text


def sources(text):
    return [unescape(one) for one in re.findall(r'<img[^>]* src="(/.*?)"', text)]


@pytest.mark.slow
def test_page_shows_runs_and_results_cancels_and_leaves_runs_alone_when_it_ends(first):
    folder, _ = first
    with studio(folder, **PATHS) as (process, address):
        page = Page(address)
        assert b'href="/run?run=one"' in page.get("/runs")
        for image in sources(page.get("/run", run="one").decode()):
            assert page.client.open(page.place + image).status == 200
        edit = {"lora": r"outputs\one", "weight": "1", "prompt": "make it snow", "more": "width=64\nheight=64"}
        page.post("/try", **edit, num_inference_steps="2")
        text = page.wait("To compare two images", "/try")
        [image] = sources(text)
        assert page.client.open(page.place + image).status == 200, "a result of the tab Try"
        page.post("/try", **edit, num_inference_steps="100000")
        page.wait("denoising step", "/try")
        page.post("/try/stop", memory="")
        text = page.wait("stopped by SIGBREAK", "/try")
        assert "free the memory" in text, "the model stays loaded"

        settings = "\n".join([*FEW, "trainer.max_steps=1000"])
        page.post("/start", output_dir="outputs/two", when="now", more=settings)
        page.wait("running", "/run", run="two")
        page.post("/ask", run="two", request="stop")
        page.wait("failed", "/run", run="two")
        page.post("/start", output_dir="outputs/three", when="now", more=settings)
        page.wait("running", "/run", run="three")
        page.wait("stop after this step", "/run", run="three")
        run = RunFolder(folder / "outputs/three")
        started = psutil.Process(holder(run.path).pid)
        assert os.getsid(started.pid) != os.getsid(process.pid), "Ctrl-C reaches the page only"
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert started.is_running()
        run.ask("stop")
        started.wait(60)
    assert run.checkpoint.is_file()


def test_two_pages_do_not_share_a_port(tmp_path):
    with studio(tmp_path, **PATHS) as (_, address):
        port = urlsplit(address).port
        command = [sys.executable, ROOT / "studio.py", f"port={port}", "open=false"]
        more = {"capture_output": True, "text": True, "check": False}
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **PATHS}, timeout=60, **more)
    assert f"error: host=127.0.0.1 port={port}: " in done.stderr


def opens_text(call):
    """Return whether a call opens, reads or writes a text in the system's own encoding."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    is_path = isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name)
    first = [one.value for one in call.args if isinstance(one, ast.Constant)]
    if "encoding" in {one.arg for one in call.keywords} or "utf-8" in first:
        return False
    if name == "open" and first and set(str(first[0])) <= set("rwaxt+"):
        return True
    return name == "write_text" or (name == "read_text" and (is_path or not call.args))


def test_text_files_have_one_encoding_on_all_systems():
    """Windows would read and write its own."""
    nodes = ((path, one) for path in FILES for one in ast.walk(ast.parse(path.read_text())))
    calls = [(path, one) for path, one in nodes if isinstance(one, ast.Call)]
    assert len(calls) > 1000
    assert [f"{path}:{call.lineno}" for path, call in calls if opens_text(call)] == []
