"""Seconds by stage."""

from lightning_modules import timing


def test_nested_stages_of_the_timer_count_once(monkeypatch):
    """Otherwise the rates of the steps in between would be negative."""
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    timer = timing.StageTimer()
    with timer.stage(timing.NOT_TRAINING), timer.stage("decode"), timer.stage(timing.NOT_TRAINING):
        pass
    assert timer.seconds == {timing.NOT_TRAINING: 5.0, "decode": 3.0}
