"""Several runs of train.py, one after the other: overrides as a JSON list of lists."""

import json
import os
import socket
import sys
from functools import partial

import train

DDP = ["trainer.devices=2", "trainer.strategy=ddp"]
FSDP = ["trainer=fsdp", "trainer.devices=2"]


def arguments_of(runs):
    return json.dumps([[str(part) for part in overrides] for overrides in runs])


def as_rank(rank: int, port: int) -> None:
    """Let this process be one of two as torchrun starts them."""
    of_torchrun = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
    }
    os.environ.update({name: str(value) for name, value in of_torchrun.items()})


def start_two(start, runs, **more):
    return start_ranks(start, [runs, runs], **more)


def start_ranks(start, runs, **more):
    """Start two processes as torchrun does, each with its own runs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = "tests.support.several_runs"
    return [start(script, arguments_of(runs[rank]), before=partial(as_rank, rank, port), **more) for rank in range(2)]


def main() -> None:
    for overrides in json.loads(sys.argv[1]):
        sys.argv = ["train.py", *overrides]
        train.main()


if __name__ == "__main__":
    main()
