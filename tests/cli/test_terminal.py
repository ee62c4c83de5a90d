"""The log that a run keeps of its terminal."""

import sys

import pytest

from cli.terminal import kept_log
from foundation.errors import UserError
from runs.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    """Return a run with settings."""
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    run.config.touch()
    return run


def say(*texts):
    for text in texts:
        print(text, end="", file=sys.stderr, flush=True)


def test_log_has_the_lines_of_the_terminal_without_colours_and_redrawn_bars(run, capsys):
    bars = ("\r\x1b[2Kstep 1", "\r\x1b[2K\x1b[1mnote\x1b[0m: caf\u00e9\n", "step 1", "\r\x1b[2Kstep 2", "\n")
    with kept_log(run):
        say("load", "ing\n", *bars)
    with kept_log(run):
        say("resumed\n")
    assert run.log.read_text() == "loading\nnote: caf\u00e9\nstep 2\nresumed\n"
    assert "".join(bars) in capsys.readouterr().err


def test_log_has_each_line_once_if_the_output_goes_there_already(run, monkeypatch):
    with run.log.open("a") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with kept_log(run):
            say("loading\n")
    assert run.log.read_text() == "loading\n"


def test_log_ends_in_the_traceback_of_an_error_of_ours(run):
    with pytest.raises(ZeroDivisionError), kept_log(run):
        print(1 // 0)
    assert run.log.read_text().endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_a_run_refused_before_it_has_settings_leaves_no_log(run):
    run.config.unlink()
    with pytest.raises(SystemExit), kept_log(run):
        sys.exit(print("error: data.root=x: no such folder", file=sys.stderr))
    assert not run.log.exists()


def test_log_is_written_through_no_link(run, tmp_path):
    run.log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link or a pipe"), kept_log(run):
        say("x\n")
    assert not (tmp_path / "elsewhere").exists()
