"""The detection of hanging runs; `test_peers` has a real one."""

from types import SimpleNamespace

import pytest

from callbacks.lifecycle import Watchdog
from lightning_modules.timing import LOADING, NOT_TRAINING, StageTimer

# Ticks of the watchdog in the time that it allows.
ALLOWED = 10


@pytest.fixture
def aborted(monkeypatch):
    """Watch a timer for a number of ticks, with something done at each; returns the ticks at which a run is ended."""
    watchdog, timer = Watchdog(1), StageTimer()

    def watch(ticks, each=lambda tick: None):
        done, ended = [], []

        def wait(seconds):
            assert seconds * ALLOWED == 60
            each(len(done))
            done.append(seconds)
            return len(done) > ticks or bool(ended)

        monkeypatch.setattr(watchdog, "_ended", SimpleNamespace(wait=wait))
        monkeypatch.setattr(watchdog, "_abort", lambda: ended.append(len(done)))
        watchdog._watch(SimpleNamespace(base=SimpleNamespace(timer=timer)), 60)
        return ended

    return timer, watch


def test_a_run_without_progress_is_ended_but_not_while_it_loads_or_proceeds(aborted):
    timer, watch = aborted
    with timer.stage(NOT_TRAINING), timer.stage(LOADING):
        assert watch(3 * ALLOWED) == []
    with timer.stage(NOT_TRAINING):
        assert watch(3 * ALLOWED, lambda tick: tick % (ALLOWED - 1) or timer.note_progress()) == []
        assert watch(3 * ALLOWED) == [ALLOWED + 1], "the first tick only looks"
