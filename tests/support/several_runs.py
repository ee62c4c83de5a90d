"""Several runs of train.py, one after the other: overrides as a JSON list of lists."""

import json
import os
import sys

import train


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


def main() -> None:
    for overrides in json.loads(sys.argv[1]):
        sys.argv = ["train.py", *overrides]
        train.main()


if __name__ == "__main__":
    main()
