"""Two nodes: two torchrun agents on the loopback address, each of which has started a process."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.caches import only, short
from tests.support.commands import ROOT, wait_until
from tests.support.pictures import make_pairs
from tests.support.same_runs import SMOOTH_ADAM, assert_close

pytestmark = pytest.mark.slow


@pytest.fixture
def agent(tmp_path):
    """Starts an agent of two; both must use one port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = []

    def agent(name, *overrides):
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=3"]
        meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=7"]
        # So that one in the place of a killed agent is told the address of the others: torch 2.14 tells it in the first
        # round alone, unless each round makes a store of its own.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        meeting += [f"--rdzv_conf=is_host={int(name == 'first')}", "--local_addr=127.0.0.1"]
        log = (tmp_path / f"{name}.log").open("a")
        command = [sys.executable, *launcher, *meeting, str(ROOT / "train.py"), *map(str, overrides)]
        agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return agents[-1]

    yield agent
    for process in agents:
        for pid in (process.pid, *children(process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def children(pid):
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def logs(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def test_two_nodes_are_one_process_with_the_doubled_batch_also_when_an_agent_is_replaced(agent, run, tiny, tmp_path):
    """They build one cache. The killed agent's process ends with it; that of the other is started again, and resumes.

    The numbers of devices and nodes come from torchrun.
    """
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 8)
    settings = [SMOOTH_ADAM, "save_every=2", "scheduler=constant", "resume=auto"]
    run("train", *short(tiny, root, tmp_path / "alone" / "run", 4), *settings, "data.batch_size=2")
    folder = tmp_path / "both" / "run"
    held = "+callbacks.hold={_target_: tests.support.hold.Hold, step: 3, marker: " + str(tmp_path / "held") + "}"
    command = [*short(tiny, root, folder, 4), *settings, held]
    first, second = (agent(name, *command) for name in ("first", "second"))
    wait_until((tmp_path / "held").exists, first, 150)
    of_second = children(second.pid)
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    again = agent("second", *command)
    assert [process.wait(250) for process in (first, again)] == [0, 0], logs(tmp_path)
    assert not [pid for pid in of_second if os.path.exists(f"/proc/{pid}")]
    text = logs(tmp_path)
    assert text.count("encoded 8 samples") == 1, text
    assert text.count("done: ") == 1, text
    assert "resumed    after step" in text, text
    assert_close(folder, tmp_path / "alone" / "run")
    ids = [only(tmp_path / name / "cache").sample_ids() for name in ("alone", "both")]
    assert ids[0] == ids[1]
