"""Lines about work that takes long."""

from lightning_modules import timing
from lightning_modules.timing import ProgressLines


def test_a_line_says_how_much_is_left_and_comes_seldom(monkeypatch, caplog):
    seconds = iter([0, 4, 12, 13, 30])
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(seconds))
    progress = ProgressLines(6, "captions")
    with caplog.at_level("INFO", logger="retouch"):
        for number in range(1, 5):
            progress.done(number)
    assert caplog.messages == ["2 of 6 captions  left 0:00:24", "4 of 6 captions  left 0:00:15"]


def test_a_stage_beside_training_within_another_counts_once(monkeypatch):
    """Else rates of the steps between would be negative."""
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    timer = timing.StageTimer()
    with timer.stage(timing.NOT_TRAINING), timer.stage("decode"), timer.stage(timing.NOT_TRAINING):
        pass
    assert timer.seconds == {timing.NOT_TRAINING: 5.0, "decode": 3.0}
