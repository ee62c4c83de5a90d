"""The log that a run keeps of its terminal."""

import signal
import sys

import pytest

from cli.terminal import configure_logging, kept_log, log
from foundation.errors import UserError
from foundation.notes import note_once
from runs.run_folder import RunFolder, best_effort
from runs.signals import Stopped


@pytest.fixture
def run(tmp_path):
    """Return a run with settings."""
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    run.config.touch()
    return run


@pytest.fixture(autouse=True)
def terminal(capsys):
    """Set up the log, on the stderr of the test."""
    configure_logging()
    return capsys


def test_log_has_the_lines_of_the_terminal_with_control_characters_escaped(run, terminal):
    with kept_log(run):
        log.info("loading\nnote: caf\u00e9 \x1b[2J")
    with kept_log(run):
        log.info("resumed")
    log.info("of the next job")
    assert run.log.read_text() == "loading\nnote: caf\u00e9 \\x1b[2J\nresumed\n"
    assert terminal.readouterr().err == run.log.read_text() + "of the next job\n"


def test_log_has_each_line_once_if_the_output_goes_there_already(run, monkeypatch):
    with run.log.open("a") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with kept_log(run):
            log.info("loading")
    assert run.log.read_text() == "loading\n"


def test_log_ends_in_the_line_of_a_mistake_or_a_stop(run):
    for error in (UserError("data.root=x: no such folder"), Stopped(signal.SIGINT, "after step 3")):
        error.add_note("a note")
        with pytest.raises(type(error)), kept_log(run):
            raise error
    assert run.log.read_text() == "error: data.root=x: no such folder; a note\nstopped by SIGINT after step 3; a note\n"


def test_log_ends_in_the_traceback_of_an_error_of_ours(run):
    with pytest.raises(ZeroDivisionError), kept_log(run):
        print(1 // 0)
    assert run.log.read_text().endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_a_run_refused_before_it_has_settings_leaves_no_log(run):
    run.config.unlink()
    with pytest.raises(UserError), kept_log(run):
        raise UserError("data.root=x: no such folder")
    assert not run.log.exists()


def test_log_is_written_through_no_link(run, tmp_path):
    run.log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link or a pipe"), kept_log(run):
        log.info("x")
    assert not (tmp_path / "elsewhere").exists()


def test_each_note_appears_once_a_run_whatever_repeats_it(terminal, monkeypatch):
    for rank, jobs in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        for job in "ab":
            configure_logging(job)
            for _ in range(3):
                note_once("the caption is cut")
                log.warning("note: attempt 2")
                with best_effort("report"):
                    raise OSError("full")
                log.warning("step 3 is skipped")
        text = terminal.readouterr().err
        for line in ("the caption is cut", "attempt 2", "no report: full"):
            assert text.count(f"note: {line}\n") == jobs, "not connected: the first process speaks for all"
        assert text.count("step 3") == 6
