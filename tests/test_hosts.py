"""Two machines with addresses of their own, as network namespaces, one of which is cut off."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.support.commands import ROOT, lora_bytes, short, wait_until

pytestmark = pytest.mark.slow

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """The names of the two, each with a device `link0` to the other."""
    names = [f"retouch-{os.getpid()}-{number}" for number in range(2)]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def nodes(hosts, tmp_path):
    """Starts train.py on both by torchrun."""
    started = []

    def nodes(*overrides):
        for rank, host in enumerate(hosts):
            meeting = ["--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}", f"--master_addr={ADDRESSES[0]}"]
            launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--master_port=29500"]
            command = ["ip", "netns", "exec", host, *launcher, str(ROOT / "train.py"), *map(str, overrides)]
            log = (tmp_path / f"{rank}.log").open("a")
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "link0", "PYTHONPATH": str(ROOT)}
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return started[-2:]

    yield nodes
    for process in started:
        for one in trainers(process):
            one.kill()
        process.kill()
        process.wait()


def trainers(node):
    """The processes that torchrun has started."""
    try:
        return [one for one in psutil.Process(node.pid).children(recursive=True) if one.status() != "zombie"]
    except psutil.NoSuchProcess:
        return []


def logs(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def test_when_a_machine_is_cut_off_both_end_by_the_watchdog_and_resume_to_the_same_bits(
    nodes, hosts, in_two_processes, tiny, pairs, tmp_path
):
    settings = ["save_every=2", "scheduler=constant", "resume=auto"]
    status, text = in_two_processes([[*short(tiny, pairs, tmp_path / "whole", 4), *settings]])
    assert status == 0, text
    command = [*short(tiny, pairs, tmp_path / "run", 4), *settings]
    held = "+callbacks.hold={_target_: tests.support.hold.HoldOnce, step: 3, marker: " + str(tmp_path / "held") + "}"
    cut = nodes(*command, held, "watchdog_minutes=0.2")
    wait_until((tmp_path / "held").exists, cut[0])
    alive = [one for node in cut for one in trainers(node)]
    assert len(alive) >= 2
    ip("-n", hosts[1], "link", "set", "link0", "down")
    started = time.monotonic()
    _, left = psutil.wait_procs(alive, 40)
    seconds = time.monotonic() - started
    text = logs(tmp_path)
    print(f"both ended {seconds:.1f} s after the machine was cut off")
    assert not left, text
    assert seconds < 30, text
    assert "error: nothing was done for 0.2 minutes (watchdog_minutes): where it waits is above" in text
    for node in cut:
        node.send_signal(signal.SIGTERM)
        node.wait(60)
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2
    ip("-n", hosts[1], "link", "set", "link0", "up")
    again = nodes(*command)
    assert [node.wait(120) for node in again] == [0, 0], logs(tmp_path)
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "whole")
