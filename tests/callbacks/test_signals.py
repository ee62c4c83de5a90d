"""SIGINT and SIGTERM end all commands alike."""

import importlib
import os
import signal
import sys
from contextlib import suppress

import pytest

from cli import terminal as console
from lightning_modules.sampling import Sampler
from runs import signals
from runs.signals import Stop, Stopped
from tests.support.combinations import first
from tests.support.commands import rows, short


def tell(number):
    os.kill(os.getpid(), number)


def test_first_signal_waits_for_the_current_piece_of_work_and_the_second_does_not(monkeypatch):
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        stop.busy_with = "this batch"
        tell(signal.SIGTERM)
        tell(signal.SIGINT)
        assert stop.signal is signal.SIGTERM, "what comes at once is a duplicate"
        monkeypatch.setattr(signals, "DEBOUNCE", 0.0)
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            tell(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    with stop.listening(), pytest.raises(Stopped, match="stopped by SIGINT"):
        tell(signal.SIGINT)


@pytest.mark.parametrize("how", ["signal", "busy", "request"])
def test_nothing_of_one_command_stops_the_next(how):
    stop = Stop()
    with suppress(Stopped), stop.listening():
        stop.busy_with = "this batch" if how == "busy" else None
        if how == "request":
            stop.signal, stop.file, stop.requests = signal.SIGINT, "requests/stop", {"sample"}
        else:
            tell(signal.SIGTERM)
        stop.check()
    stop.check()
    assert (stop.signal, stop.busy_with, stop.file, stop.requests) == (None, None, "", set())


def test_prediction_stops_after_the_current_image(run, tmp_path, monkeypatch):
    """The request has many images of one prompt, two at once."""
    out = tmp_path / "out"
    sample = Sampler.sample

    def told(*args):
        if (out / "predictions.jsonl").exists():
            tell(signal.SIGINT)
        return sample(*args)

    monkeypatch.setattr(Sampler, "sample", told)
    request = ["prompt=[x,y]", "width=32", "height=32", "num_inference_steps=1", "num_images_per_prompt=2000"]
    outcome = run("predict", *request, "batch_size=2", f"output_dir={out}", ok=False)
    assert outcome.status == 128 + signal.SIGINT
    assert "SIGINT: stopping after this one" in outcome.text
    assert f"stopped by SIGINT; finished images are in {out}" in outcome.text
    assert "Traceback" not in outcome.text
    made = len(list(out.glob("*.png")))
    assert 0 < made < 4000
    assert made % 2 == 0, "both of a batch are written"
    assert made == len((out / "predictions.jsonl").read_text().splitlines())


@pytest.mark.parametrize("work", first(1, ["sampling", "validating"]))
def test_training_stops_between_two_sample_images_and_within_validation_and_the_resumed_run_does_all(
    run, tiny, pairs, tmp_path, monkeypatch, work
):
    folder, done, validation = tmp_path / "run", [], importlib.import_module("callbacks.validation")
    owner, name = (Sampler, "sample") if work == "sampling" else (validation, "_band_losses")
    function = getattr(owner, name)

    def told(*args):
        if signals.stop.busy_with:  # after the first step
            done.append(args)
            tell(signal.SIGTERM)
        return function(*args)

    monkeypatch.setattr(owner, name, told)
    settings = ["sample_every=2", "data.val_count=3", "scheduler=constant", "resume=auto"]
    command = [*short(tiny, pairs, folder, 4, shown=True), *settings]
    outcome = run("train", *command, ok=False)
    assert outcome.status == 128 + signal.SIGTERM, outcome.text
    assert f"stopped by SIGTERM after step 2, saved in {folder}" in outcome.text
    assert len(done) == 1, "of three"
    assert [row["step"] for row in rows(folder)] == [0]
    monkeypatch.undo()
    run("train", *command)
    assert [row["step"] for row in rows(folder)] == [0, 2, 4]
    assert [len(list(path.glob("*.png"))) for path in sorted(folder.glob("samples/step-*"))] == [3, 3, 3]


def test_other_tasks_stop_at_once(run, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.caches.write_figure", lambda *_: tell(signal.SIGTERM))
    outcome = run("predict", "task=preview", f"data.root={pairs}", f"output_dir={tmp_path / 'out'}", ok=False)
    assert outcome.status == 128 + signal.SIGTERM
    assert outcome.text.splitlines()[-1] == "stopped by SIGTERM"
    assert not (tmp_path / "out").exists()


def test_output_that_nobody_reads_is_dropped_quietly(monkeypatch):
    end, pipe = os.pipe()
    with os.fdopen(pipe, "w") as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with console.command_line():
            print("read", file=sys.stderr)
            assert os.read(end, 100) == b"read\n"
            os.close(end)
            for _ in range(3):
                print("x" * 100_000, file=sys.stderr)
