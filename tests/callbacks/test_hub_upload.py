"""Uploads: what arrives, who may see it, and that nothing of the hub costs a run."""

import os
import signal
import time
from functools import partial

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

from runs import uploads
from tests.support.commands import lora_bytes, short, start_cold, wait_until
from tests.support.several_runs import DDP
from tests.support.upload_server import (
    COMMIT,
    CREATE,
    NAME,
    PREUPLOAD,
    PUT,
    TOKEN,
    upload_hub,
    use_hub,
)

WEIGHTS = "pytorch_lora_weights.safetensors"


@pytest.fixture
def hub():
    with upload_hub() as hub:
        yield hub


@pytest.fixture
def settings(tiny, pairs, tmp_path):
    return [*short(tiny, pairs, tmp_path / "run", 2), f"hub.push={NAME}"]


@pytest.fixture
def here(hub, monkeypatch):
    """Let runs of this process upload to the hub, for this test."""
    from huggingface_hub import constants

    for place, name in [(constants, n) for n in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "ENDPOINT")]:
        monkeypatch.setattr(place, name, getattr(place, name))
    for name in ("PAUSES", "SILENCE"):
        monkeypatch.setattr(uploads, name, getattr(uploads, name))
    monkeypatch.setenv("HF_TOKEN", "")
    use_hub(hub.address)
    return hub


def on_disk(folder, prefix=""):
    return {f"{prefix}{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(text, word):
    return [line for line in text.splitlines() if word in line]


@pytest.mark.slow
def test_weights_and_cards_arrive_byte_for_byte_in_a_private_repository(hub, tiny, pairs, tmp_path):
    """One of two processes uploads, with only the usual environment."""
    run = tmp_path / "run"
    common = [*short(tiny, pairs, run, 2, shown=True), "data.val_count=2", "model.sampling.num_inference_steps=1"]
    environment = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    process = start_cold("train", *common, *DDP, f"hub.push={NAME}", **environment)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert hub.files == on_disk(run / "lora/last") | on_disk(run / "lora/best", "best/")
    assert {WEIGHTS, "README.md", "samples.png", f"best/{WEIGHTS}"} < hub.files.keys()
    for name, content in hub.files.items():
        assert str(tmp_path.parent).encode() not in content, name
        assert str(tiny.parent).encode() not in content, name
    [created] = hub.created
    assert created["organization"], created["name"] == tuple(NAME.split("/"))
    assert created.get("visibility") == "private" or created.get("private") is True
    assert len(lines(text, f"uploaded: {hub.address}/{NAME}")) == 1
    assert not any(word in text for word in ("%|", "Warning", "warning of the hub", "Retrying", TOKEN))
    assert not any(TOKEN.encode() in content for content in on_disk(run).values())


@pytest.mark.slow
@pytest.mark.parametrize(("where", "how"), [(PUT, "reset"), (COMMIT, 500), (CREATE, "hang"), (PREUPLOAD, 503)])
def test_hub_that_fails_in_the_middle_gets_all_in_the_end(here, run, tmp_path, settings, where, how):
    here.answer = lambda path, count: how if where in path and count == 1 else None
    if how == "hang":
        uploads.SILENCE = 2.0  # for this test, by `here`
    began = time.monotonic()
    text = run("train", *settings).text
    assert time.monotonic() - began < 30, "a hub that says nothing for a minute is not waited for"
    assert here.files == on_disk(tmp_path / "run/lora/last")
    assert lines(text, "uploaded: ")
    assert not lines(text, "note: not")
    assert "Retrying" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how", "tries"), [(CREATE, 401, 1), (COMMIT, "hang", 3), (CREATE, "reset", 3), (COMMIT, 413, 1)]
)
def test_hub_that_always_fails_costs_one_line(here, run, tmp_path, settings, where, how, tries):
    here.answer = lambda path, count: how if where in path else None
    if how == "hang":
        uploads.SILENCE = 2.0  # for this test, by `here`
    outcome = run("train", *settings)
    assert outcome.status == 0
    [line] = lines(outcome.text, "not uploaded")
    folder = tmp_path / "run/lora/last"
    assert line.endswith(f"; by hand: hf upload {NAME} {folder} . --private")
    assert how in ("reset", "hang") or str(how) in line
    assert TOKEN not in outcome.text
    assert on_disk(folder).keys() == {WEIGHTS, "README.md"}
    assert sum(where in path for path in here.asked) == tries
    assert here.files == {}


@pytest.mark.slow
def test_resumed_run_uploads_again(here, run, tmp_path, settings):
    run("train", *settings)
    here.files.clear()
    (tmp_path / "run/lora/last/README.md").unlink()
    outcome = run("train", *settings, "ckpt_path=last")
    assert here.files == on_disk(tmp_path / "run/lora/last")
    assert "README.md" in here.files
    assert lines(outcome.text, "uploaded: ")


def test_no_bar_of_the_hub_is_drawn(here, run, settings):
    """Tested on a terminal, where the hub would draw them."""
    enable_progress_bars()
    run("train", *settings)
    assert here.files
    assert are_progress_bars_disabled()


@pytest.mark.slow
def test_stop_does_not_wait_for_the_hub(hub, start, tmp_path, settings):
    hub.answer = lambda path, count: "hang"
    process = start("train", *settings, before=partial(use_hub, hub.address))
    wait_until(lambda: len(hub.asked) > 0, process)
    os.kill(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=30)  # half of the time for which the hub says nothing
    assert process.returncode == 130, text
    [line] = lines(text, "not uploaded")
    assert "stopped by SIGINT; by hand: hf upload" in line
    assert lora_bytes(tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("hub.push=name", "hub.push=name: give owner/name"),
        ("hub.push=a/b/c", "hub.push=a/b/c: give owner/name"),
        ("hub.push=owner/na me", "hub.push=owner/na me: give owner/name"),
        ("hub.private=yes please", "hub.private=yes please: must be true or false"),
    ],
)
def test_settings_that_cannot_be_are_said_at_once(here, refuses, setting, said):
    refuses(f"hub.push={NAME}", setting, words=said)
    assert here.asked == []


def test_without_a_token_nothing_starts(here, refuses, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    refuses(f"hub.push={NAME}", words=("hf auth login", "HF_TOKEN"))


def test_without_network_nothing_starts(refuses, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert TOKEN not in refuses(f"hub.push={NAME}", words="HF_HUB_OFFLINE")
