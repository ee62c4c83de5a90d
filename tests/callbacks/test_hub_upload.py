"""Uploads: what is sent, and that nothing of the hub costs a run. Only huggingface_hub's calls are replaced."""

import logging
import os
import signal
import threading
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from cli import hub_upload
from runs.run_folder import RunFolder
from runs.signals import stop

NAME = "owner/name"
TOKEN = "hf_averysecrettoken"
WEIGHTS = "pytorch_lora_weights.safetensors"


class Hub:
    """The hub: number of uploads, privacy by repository, files, and the error of each upload."""

    def __init__(self) -> None:
        self.asked = 0
        self.created: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.failure: Exception | None = None

    def create(self, repository, private, exist_ok):
        assert exist_ok
        self.asked += 1
        self.created[repository] = private
        if self.failure:
            raise self.failure

    def take(self, repo_id, folder_path, path_in_repo, ignore_patterns):
        assert repo_id in self.created
        found = on_disk(folder_path)
        kept = filter_repo_objects(found, ignore_patterns=ignore_patterns)
        self.files |= {str(Path(path_in_repo, name)): found[name] for name in kept}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(HfApi, "create_repo", lambda _, *args, **more: hub.create(*args, **more))
    monkeypatch.setattr(HfApi, "upload_folder", lambda _, **more: hub.take(**more))
    return hub


@pytest.fixture
def said(monkeypatch, caplog):
    """Return the lines of an upload; a run in this process takes Retouch's logger away from caplog."""
    monkeypatch.setattr(hub_upload, "log", logging.getLogger("uploads"))
    caplog.set_level(logging.INFO, "uploads")
    return caplog


def on_disk(folder, prefix=""):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {f"{prefix}{path.relative_to(folder)}": path.read_bytes() for path in paths}


def test_last_and_best_arrive_with_their_cards(hub, gallery, copied, said):
    folder = copied(gallery("shown"))
    whole = on_disk(folder / "lora/last") | on_disk(folder / "lora/best", "best/")
    (folder / "lora/last/.weights.1.tmp").write_text("unfinished")
    hub_upload.push_to_hub(RunFolder(folder), "lora", NAME, True)
    assert hub.files == whole
    assert {WEIGHTS, "README.md", "samples.png", f"best/{WEIGHTS}"} < hub.files.keys()
    assert hub.created == {NAME: True}
    assert said.messages[-2:] == [f"uploading to {NAME}", f"uploaded: {constants.ENDPOINT}/{NAME}"]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("lora", "private"),
        ("lora/last", "private/last"),
        ("lora/best", "private/best"),
        ("lora/best", "run/checkpoints"),
        ("lora/best", "run/lora/last"),
        ("lora/best", "nowhere"),
        ("lora/last/more", "private"),
        ("lora/last/deep/more.txt", "private/last/secret.txt"),
        ("lora/last/[x].txt", "private/last/secret.txt"),
    ],
)
def test_nothing_is_published_through_a_link(hub, gallery, copied, said, tmp_path, link, target):
    run, private = RunFolder(copied(gallery("shown"))), tmp_path / "private"
    for name in ("last", "best"):
        (private / name).mkdir(parents=True)
        (private / name / "secret.txt").write_text("secret")
    (run.path / "lora/last/deep").mkdir()
    at = run.path / link
    if at.is_dir():
        at.rename(tmp_path / "moved")
    at.symlink_to(run.path / target[4:] if target.startswith("run/") else tmp_path / target)
    hub_upload.push_to_hub(run, "lora", NAME, True)
    assert b"secret" not in hub.files.values()
    assert ("best/README.md" in hub.files) == (link not in ("lora", "lora/best"))
    assert not [name for name in hub.files if name.endswith("ckpt")]
    [note] = [line for line in said.messages if "link" in line]
    assert Path(link).name in note


def test_hub_that_fails_costs_one_line(hub, gallery, said):
    response = httpx2.Response(401, request=httpx2.Request("POST", "http://hub"))
    hub.failure, folder = HfHubHTTPError(f"401 of {TOKEN}", response=response), gallery("plain").folder
    hub_upload.push_to_hub(RunFolder(folder), "lora", NAME, True)
    assert said.messages[-1].endswith(f"; by hand: hf upload {NAME} {folder}/lora/last . --private")
    assert "401" in said.messages[-1]
    assert TOKEN not in said.text
    assert not hub.files


def test_stopping_does_not_wait_for_the_hub(hub, gallery, monkeypatch, said):
    ended = threading.Event()

    def hang(*_):
        ended.wait(0.3)  # until the upload is waited for
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(60)

    monkeypatch.setattr(hub_upload, "_send", hang)
    with stop.listening():
        hub_upload.push_to_hub(RunFolder(gallery("shown").folder), "lora", NAME, False)
    ended.set()
    assert "stopped by SIGINT; by hand: hf upload" in said.messages[-1]


def test_wrong_name_and_a_missing_token_are_refused_at_once(hub, refuses, monkeypatch, tmp_path):
    refuses("hub.push=name", words="hub.push=name: give owner/name")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    refuses(f"hub.push={NAME}", words=("hf auth login", "HF_TOKEN"))
    assert hub.asked == 0


def test_without_network_nothing_starts(refuses, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert TOKEN not in refuses(f"hub.push={NAME}", words="HF_HUB_OFFLINE")
