"""The detection of hanging runs; `test_peers` has a real one."""

import threading
import time
from types import SimpleNamespace

import pytest

from callbacks.lifecycle import Watchdog
from lightning_modules.timing import LOADING, NOT_TRAINING, StageTimer

SECONDS = 0.3


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


def test_loading_and_progress_are_no_run_that_hangs(watched):
    timer, found = watched
    with timer.stage(NOT_TRAINING), timer.stage(LOADING):
        assert not found.wait(2 * SECONDS)
    with timer.stage(NOT_TRAINING):
        for _ in range(10):
            time.sleep(SECONDS / 5)
            timer.note_progress()
        assert not found.is_set()
        assert found.wait(20), "but a validation without progress is"
