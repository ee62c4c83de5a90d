"""The detection of hanging runs; `test_peers` has a real one."""

import threading
import time
from types import SimpleNamespace

import pytest

from callbacks.lifecycle import Watchdog
from lightning_modules.timing import LOADING, NOT_TRAINING, StageTimer

SECONDS = 0.6


@pytest.fixture
def watched(monkeypatch):
    """A timer that is watched; and when it was found to hang."""
    found, watchdog, timer = threading.Event(), Watchdog(SECONDS / 60), StageTimer()

    def end():
        found.set()
        watchdog._ended.set()

    monkeypatch.setattr(watchdog, "_abort", end)
    module = SimpleNamespace(base=SimpleNamespace(timer=timer))
    thread = threading.Thread(target=watchdog._watch, args=(module, SECONDS))
    thread.start()
    yield timer, found
    watchdog._ended.set()
    thread.join()


def test_a_download_may_take_as_long_as_it_takes(watched):
    timer, found = watched
    with timer.stage(NOT_TRAINING), timer.stage(LOADING):
        assert not found.wait(3 * SECONDS)
    assert found.wait(20)


def test_a_long_validation_is_no_run_that_hangs(watched):
    timer, found = watched
    with timer.stage(NOT_TRAINING):
        for _ in range(15):
            time.sleep(SECONDS / 5)
            timer.note_progress()
        assert not found.is_set()
        assert found.wait(20), "but one without a sample is"
