"""Devices and nodes follow the processes that torchrun or srun started."""

import pytest

from cli.placement import join_processes
from foundation.errors import UserError
from tests.support.commands import compose

TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}
FOUR_BY_TWO = ["trainer.devices=4", "trainer.num_nodes=2"]


@pytest.fixture
def joined(monkeypatch):
    def joined(environment, overrides=()):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cfg = compose("train", "data.root=x", *overrides)
        join_processes(cfg)
        return cfg.trainer.devices, cfg.trainer.num_nodes

    return joined


@pytest.mark.parametrize(
    ("environment", "overrides", "expected"),
    [
        (TORCHRUN, [], (8, 2)),
        (SRUN, [], (4, 2)),
        (SRUN, FOUR_BY_TWO, (4, 2)),
        ({}, [], (1, 1)),
    ],
)
def test_devices_and_nodes_are_those_that_were_started(joined, environment, overrides, expected):
    assert joined(environment, overrides) == expected


@pytest.mark.parametrize(
    ("environment", "overrides", "message"),
    [
        (TORCHRUN, FOUR_BY_TWO, r"torchrun has started 8 processes on each of 2 nodes; leave both settings"),
        ({"SLURM_NTASKS": "8"}, [], r"has 8 tasks, and one command was started: srun python train\.py"),
    ],
)
def test_contradictions_are_refused(joined, environment, overrides, message):
    with pytest.raises(UserError, match=message):
        joined(environment, overrides)
