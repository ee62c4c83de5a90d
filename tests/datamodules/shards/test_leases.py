"""Work that is divided by leases: one process at a time does a unit, and another when that one has ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from datamodules.errors import UserError
from datamodules.shards import leases as module
from datamodules.shards.leases import Leases, unit_name
from datamodules.shards.places import Folder
from tests.support.commands import ROOT


def never():
    raise AssertionError("nobody is at work in a closed round")


HOLD = """
import sys, time
from pathlib import Path
from datamodules.shards.leases import Leases
from datamodules.shards.places import Folder
leases = Leases(Folder(Path(sys.argv[1])))
with leases.working(lambda: None):
    leases.take(["a", "b"], 2)
    leases.finish("a")
    print("taken", flush=True)
    time.sleep(100)
"""


def test_each_unit_is_taken_once_whoever_comes_first(tmp_path):
    names = [unit_name(number) for number in range(60)]
    taken = []

    def work():
        leases = Leases(Folder(tmp_path / "work"))
        with leases.working(never):
            while open := leases.open(names):
                for name in leases.take(open, 3):
                    taken.append(name)
                    leases.finish(name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == names


def test_what_a_killed_process_had_is_free_at_once_on_its_machine(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "work"], stdout=subprocess.PIPE, cwd=ROOT)
    holder.stdout.readline()
    leases = Leases(Folder(tmp_path / "work"))
    assert leases.take(["a", "b"], 2) == {}
    assert len(leases.others()) == 1
    holder.kill()
    holder.wait()
    assert leases.others() == []
    assert leases.take(["a", "b"], 2) == {"b": False}, "its tar may be continued"


def from_elsewhere(leases):
    """Let the signs of life be those of another machine's process."""
    path = leases.here.path / f"{leases.me}.alive"
    sign = json.loads(path.read_text())
    path.write_text(json.dumps({**sign, "machine": ["another", "another"], "pid": 1}))


def test_a_process_elsewhere_that_gives_no_sign_of_life_loses_its_units(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STALE", 0.3)
    monkeypatch.setattr(module, "BEAT", 1000.0)
    gone, here = Leases(Folder(tmp_path / "work")), Leases(Folder(tmp_path / "work"))
    with gone.working(never), here.working(never):
        gone.take(["a"], 1)
        from_elsewhere(gone)
        assert here.take(["a"], 1) == {}
        time.sleep(0.2)
        from_elsewhere(gone)
        (gone.here.path / f"{gone.me}.alive").write_text("{}")  # a new sign of life
        assert here.take(["a"], 1) == {}
        time.sleep(0.2)
        assert here.take(["a"], 1) == {}
        time.sleep(0.2)
        assert here.take(["a"], 1) == {"a": True}, "it may still write to its tar"
        with pytest.raises(UserError, match=r"gave no sign of life in .* others may do its work: start again"):
            gone.require_mine()


SUSPENDED = """
import sys
from pathlib import Path
from datamodules.shards import leases
from datamodules.shards.places import Folder
leases.BEAT, leases.STALE = 0.05, 4.0
mine = leases.Leases(Folder(Path(sys.argv[1])))
with mine.working(lambda: None):
    print("working", flush=True)
    mine.take(["a", "b"], 2)
    for name in "ab":
        sys.stdin.readline()
        mine.finish(name)
        print("goes on", flush=True)
"""


def test_a_process_that_was_suspended_never_believes_its_units_its_own_again(tmp_path):
    """Nor when it has given signs of life since."""
    command = [sys.executable, "-c", SUSPENDED, tmp_path / "work"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, text=True, cwd=ROOT)
    process.stdout.readline()

    def ask():
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline()

    time.sleep(0.2)
    assert ask() == "goes on\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert ask() == ""
    assert "gave no sign of life in" in process.communicate()[1].splitlines()[-1]


def test_nobody_joins_what_those_have_left_who_have_ended(tmp_path):
    """What is to be done may have changed since. Where one of them works on, others help it."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "work"], stdout=subprocess.PIPE, cwd=ROOT)
    holder.stdout.readline()
    leases = Leases(Folder(tmp_path / "work"))
    with leases.working(never):
        assert leases.open(["a", "b"]) == ["b"]
    holder.kill()
    holder.wait()
    with leases.working(never):
        assert leases.open(["a", "b"]) == ["a", "b"]
        assert leases.take(["a", "b"], 2) == {"a": False, "b": False}


def test_of_another_machine_that_is_lost_nobody_waits_for_the_next_sign_in_vain(tmp_path, monkeypatch):
    """What it has left is not joined; one that lives gives another sign soon."""
    monkeypatch.setattr(module, "STALE", 2.0)
    lost = Leases(Folder(tmp_path / "work"))
    with lost.working(never):
        lost.once("prepare", lambda: None, never)
        from_elsewhere(lost)
        (kept,) = lost.here.path.glob("*.alive")
        sign = json.loads(kept.read_text())
    kept.write_text(json.dumps(sign))
    other = Leases(Folder(tmp_path / "work"))
    assert not other.is_in_use()
    assert Leases(Folder(tmp_path / "work")).others(), "as far as one look tells"
    waits = []
    with other.working(lambda: waits.append(time.sleep(0.05))):
        assert other.open(["prepare"]) == ["prepare"]
    alive = threading.Event()

    def beat():
        while not alive.wait(0.1):
            sign["beat"] += 1
            other.write("elsewhere-1.alive", sign)

    other = Leases(Folder(tmp_path / "work"))
    with other.working(never):
        other.once("prepare", lambda: None, never)
        thread = threading.Thread(target=beat)
        thread.start()
        time.sleep(0.2)
    late = Leases(Folder(tmp_path / "work"))
    assert late.is_in_use()
    with late.working(lambda: time.sleep(0.05)):
        assert late.open(["prepare"]) == []
    alive.set()
    thread.join()


def test_who_stops_is_told_so_where_the_place_is_away(tmp_path, monkeypatch):
    def away(*args):
        raise UserError("it is away")

    def stopped():
        with Leases(Folder(tmp_path / "work")).working(never):
            monkeypatch.setattr(Folder, "remove", away)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()


def test_clocks_that_jump_take_nothing_from_anybody(tmp_path, monkeypatch):
    one, other = Leases(Folder(tmp_path / "work")), Leases(Folder(tmp_path / "work"))
    with one.working(never), other.working(never):
        one.take(["a"], 1)
        from_elsewhere(one)
        now = time.time()
        for jump in (10**6, -(10**6)):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
            assert other.take(["a"], 1) == {}


def test_a_machine_whose_clock_is_set_takes_nobody_for_another_process(tmp_path, monkeypatch):
    """The system works out from its clock when it was started, and psutil from that when a process was."""
    one, other = Leases(Folder(tmp_path / "work")), Leases(Folder(tmp_path / "work"))
    with one.working(never), other.working(never):
        one.take(["a"], 1)
        started = psutil.boot_time()
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: started + 3600)
        assert other.take(["a"], 1) == {}
        assert len(other.others()) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"hnlder": "me"}', '{"holder": 3}'])
def test_a_damaged_lease_is_held_by_nobody_that_is_known_and_is_free_in_time(tmp_path, monkeypatch, content):
    monkeypatch.setattr(module, "STALE", 0.1)
    leases = Leases(Folder(tmp_path / "work"))
    with leases.working(never):
        leases.take(["a"], 1)
        (leases.here.path / "a.0.lease").write_text(content)
        assert leases.take(["a"], 1) == {}
        time.sleep(0.2)
        assert leases.take(["a"], 1) == {"a": True}


def test_work_that_all_need_is_done_once_even_if_one_fails_in_it(tmp_path):
    leases = Leases(Folder(tmp_path / "work"))
    with pytest.raises(ZeroDivisionError), leases.working(never):
        leases.once("merge", lambda: 1 / 0, lambda: None)
    done = []
    with leases.working(never):
        for _ in range(2):
            leases.once("merge", lambda: done.append(1), lambda: None)
    assert done == [1]
    leases.close()
    assert [path.name for path in leases.here.path.iterdir()] == ["closed"]


def test_nobody_begins_a_round_while_another_is_open_whoever_comes_and_goes(tmp_path):
    """Signs of life are written, and rounds closed, at any moment of the others."""
    active, lock, failures, done = Counter(), threading.Lock(), [], []

    def come_and_go():
        leases = Leases(Folder(tmp_path / "work"))
        for _ in range(25):
            with leases.working(partial(time.sleep, 0.001)):
                with lock:
                    active[leases.here.path.name] += 1
                    if len(+active) > 1:
                        failures.append(dict(active))
                leases.once("work", partial(done.append, leases.here.path.name), partial(time.sleep, 0.001))
                with lock:
                    active[leases.here.path.name] -= 1
            leases.close()

    with ThreadPoolExecutor(5) as pool:
        for each in [pool.submit(come_and_go) for _ in range(5)]:
            each.result()
    assert not failures
    assert len(done) == len(set(done)) > 3
    assert (tmp_path / "work" / max(done)).is_dir()
