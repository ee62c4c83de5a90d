"""Tools that follow a run from outside: trackio with its own server, and messages by apprise to a server of ours."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pytest

from callbacks.loggers import WandbLogger
from tests.support.commands import metrics, short

SECRET = "averysecretchannel"
DIVERGES = ["optimizer.lr=1e20", "scheduler=constant", "model.optimization.max_nonfinite_steps=2"]
STOPS = ["+callbacks.stop={_target_: tests.support.probes.StopAt, step: 1, signals: [SIGTERM]}"]


@pytest.fixture
def inbox(monkeypatch):
    """Return the address of a server, and the (path, message) of each request that it receives."""
    monkeypatch.delenv("RETOUCH_NOTIFY", raising=False)
    received = []

    class Inbox(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"json://127.0.0.1:{server.server_port}/{SECRET}", received
        server.shutdown()


@pytest.fixture
def quick(tiny, pairs, tmp_path):
    """Return overrides of a run of two steps with sample images and a report."""
    given = short(tiny, pairs, tmp_path / "run", 2, shown=True)
    return [one for one in given if one != "logger=none"] + ["model.sampling.num_inference_steps=1"]


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_message_with_the_last_images_arrives_and_its_address_is_written_nowhere(run, inbox, quick, tmp_path):
    address, received = inbox
    outcome = run("train", *quick, "logger=[tensorboard,csv]", f"notify=[{address},{address}&{{2]")  # not for Hydra
    assert sorted(path for path, _ in received) == [f"/{SECRET}", f"/{SECRET}&%7B2"]
    message = received[0][1]
    assert message["title"] == f"{tmp_path.name}/run is finished"
    assert message["message"].startswith("loss_avg ")
    assert message["message"].endswith(" at step 2")
    [attached] = message["attachments"]
    assert base64.b64decode(attached["base64"]) == (tmp_path / "run/grid.png").read_bytes()
    assert "tensorboard" in {path.parent.name for path in files_with("sample_images", tmp_path / "run")}
    assert SECRET not in outcome.text
    assert not files_with(SECRET, tmp_path / "run")


@pytest.mark.slow
def test_failed_stopped_and_resumed_runs_send_a_message_each(run, inbox, quick, tmp_path, monkeypatch):
    address, received = inbox
    outcome = run("train", *quick, *DIVERGES, "trainer.max_steps=9", f"notify={address}", ok=False)
    assert SECRET not in outcome.text
    [(_, failed)] = received
    assert failed["title"] == f"{tmp_path.name}/run failed"
    assert failed["message"].startswith("2 steps in a row were not finite")
    assert failed["attachments"], "of the images before training"

    received.clear()
    stopped = [*quick, f"output_dir={tmp_path / 'stopped'}"]
    outcome = run("train", *stopped, *STOPS, "trainer.max_steps=9", f"notify={address}", ok=False)
    assert outcome.status == 128 + signal.SIGTERM
    [(_, message)] = received
    assert message["title"].endswith("/stopped was stopped")
    assert message["message"].startswith("stopped by SIGTERM after step 2, saved in .../stopped; resume with ")
    assert not files_with(SECRET, tmp_path)

    received.clear()
    monkeypatch.setenv("RETOUCH_NOTIFY", address)
    resumed = [f"output_dir={tmp_path / 'stopped'}", "ckpt_path=last"]
    run("train", *resumed, "trainer.max_steps=3")
    assert [message["title"] for _, message in received] == [f"{tmp_path.name}/stopped is finished"]
    run("train", *resumed, "trainer.max_steps=4", "notify=null")
    assert len(received) == 1


@pytest.mark.slow
def test_address_in_a_users_config_is_not_copied(run, inbox, quick, tmp_path):
    address, received = inbox
    config = tmp_path / "mine" / "config.yaml"
    run("train", *quick, "logger=[tensorboard,csv]")
    config.parent.mkdir()
    config.write_text((tmp_path / "run/config.yaml").read_text().replace("notify: null", f"notify: [{address}]"))
    run("train", "-cp", str(config.parent), "-cn", "config", f"output_dir={tmp_path / 'again'}", "trust=true")
    assert [message["title"] for _, message in received] == [f"{tmp_path.name}/again is finished"]
    assert len([*tmp_path.glob("again/**/hparams.yaml")]) == 2
    assert files_with(SECRET, tmp_path) == [config]


@pytest.mark.slow
def test_message_that_is_not_delivered_is_one_note(run, inbox, quick):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = run("train", *quick, f"notify=json://127.0.0.1:{port}/{SECRET}")
    assert outcome.text.count("note: JSON did not accept the notification") == 1
    assert SECRET not in outcome.text


def test_mistakes_in_the_address_are_one_line_without_it(refuses, inbox, caplog):
    for address in (f"nosuch://{SECRET}", f"[json://a,nosuch://{SECRET}]", f"{SECRET} & {{x"):
        line = refuses(f"notify={address}", words="notify: apprise does not know an address")
        assert SECRET not in line
    assert SECRET not in caplog.text, "apprise's own lines"


@pytest.mark.parametrize(("library", "setting"), [("apprise", "notify=json://a"), ("trackio", "logger=trackio")])
def test_missing_library_is_one_line(refuses, inbox, monkeypatch, library, setting):
    monkeypatch.setitem(sys.modules, library, None)
    refuses(setting, words=(f"needs {library}", "pip install 'retouch["))


@pytest.fixture
def board(tmp_path, monkeypatch):
    """Return a function that asks trackio's own server for a project's content, and the server's address."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [Path(sys.executable).with_name("trackio"), "show", "--project", "retouch"]
    server = subprocess.Popen(
        command, env={**os.environ, "GRADIO_SERVER_PORT": str(port), "BROWSER": "true"}, stdout=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"

    def ask(name, **arguments):
        from trackio import RemoteClient

        for _ in range(300):
            try:
                return RemoteClient(url, verbose=False).predict(api_name=f"/{name}", project="retouch", **arguments)
            except OSError:
                pass
            except Exception as error:
                if "onnect" not in str(error):
                    raise
            time.sleep(0.1)
        raise AssertionError("trackio's server does not answer")

    yield ask, url
    server.kill()
    server.wait()


@pytest.mark.slow
def test_trackio_shows_metrics_settings_images_and_alerts_of_a_sweep_whose_jobs_send_messages(
    board, start, inbox, quick, tmp_path
):
    ask, url = board
    sweep = tmp_path / "sweep"
    given = [*quick, f"output_dir={sweep}", "logger=trackio", "trainer.log_every_n_steps=1", *DIVERGES[1:]]
    process = start("train", "-m", *given, "optimizer.lr=1e-4,1e20", "trainer.max_steps=3", f"notify={inbox[0]}")
    text, _ = process.communicate(timeout=300)
    assert "look at it: trackio show --project retouch" in text
    assert "job 1: " in text
    assert SECRET not in text
    assert [message["title"] for _, message in inbox[1]] == ["sweep/0 is finished", "sweep/1 failed"]
    assert not [line for line in text.splitlines() if line.startswith("*") or "[TRACKIO" in line], "trackio's own"
    runs = {one["name"]: one["id"] for one in ask("get_runs_for_project")}
    assert runs.keys() == {"sweep/0", "sweep/1"}

    logs = ask("get_logs", run="sweep/0", run_id=runs["sweep/0"])
    losses = {row["step"]: row["loss"] for row in logs if "loss" in row}
    assert losses == pytest.approx({int(row["step"]): float(row["loss"]) for row in metrics(sweep / "0")}, rel=1e-5)
    images = {(row["step"], name): value for row in logs for name, value in row.items() if name.startswith("samples/")}
    strips = {
        (int(path.parent.name[5:]), f"samples/{path.stem}"): path for path in sweep.glob("0/samples/step-*/*.png")
    }
    assert images.keys() == strips.keys()
    for key, path in strips.items():
        address = f"{url}/file?path={quote(str(tmp_path / 'trackio/media' / images[key]['file_path']))}"
        assert pixels_of(address) == pixels_of(path.as_uri())

    settings = ask("get_run_configs")
    for name, rate in (("sweep/0", 1e-4), ("sweep/1", 1e20)):
        found = settings[runs[name]]
        assert found["optimizer.lr"] == rate
        assert found["_Group"] == "sweep"
        assert found["data.root"] == ".../pairs", "as in report.html, without folders of this machine"
    alerts = [(one["run"], one["level"], one["step"], one["title"]) for one in ask("get_alerts")]
    assert sorted(alerts) == [
        ("sweep/0", "info", 3, "sweep/0 is finished"),
        ("sweep/1", "error", 3, "sweep/1 failed"),
        ("sweep/1", "warn", 2, "step 2 is skipped: not finite"),
        ("sweep/1", "warn", 3, "step 3 is skipped: not finite"),
    ]
    assert not files_with(SECRET, tmp_path)

    more = start("train", f"output_dir={sweep / '0'}", "ckpt_path=last", "trainer.max_steps=4")
    assert more.wait(300) == 0
    assert {one["name"]: one["id"] for one in ask("get_runs_for_project")} == runs, "a resumed run continues its own"
    assert max(row["step"] for row in ask("get_logs", run="sweep/0", run_id=runs["sweep/0"])) == 4


def pixels_of(address: str) -> bytes:
    from PIL import Image

    with urllib.request.urlopen(address) as file, Image.open(file) as image:
        return image.convert("RGB").tobytes()


def test_wandb_continues_its_run_from_a_checkpoint_and_only_then(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)

    def run_id(**settings):
        return WandbLogger(str(tmp_path / "run"), project="retouch", **settings)._wandb_init["id"]

    killed, started = run_id(), run_id()
    assert killed != started, "a run without a checkpoint starts again"
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/last.ckpt").touch()
    assert run_id() == run_id() == started
    assert run_id(id="mine") == run_id(version="mine") == "mine"
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    assert run_id() == started, "another process leaves the file alone"
