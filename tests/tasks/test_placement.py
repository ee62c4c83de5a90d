"""How many processes there are is known from what started them."""

import pytest

from datamodules.errors import UserError
from tasks.placement import join_processes
from tests.support.commands import compose

TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}


@pytest.fixture
def joined(monkeypatch):
    def joined(environment, *overrides):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cfg = compose("train", "data.root=x", *overrides)
        join_processes(cfg)
        return cfg.trainer.devices, cfg.trainer.num_nodes

    return joined


@pytest.mark.parametrize(("environment", "expected"), [(TORCHRUN, (8, 2)), (SRUN, (4, 2)), ({}, (1, 1))])
def test_devices_and_nodes_are_those_that_were_started(joined, environment, expected):
    assert joined(environment) == expected


def test_one_process_of_torchrun_is_one(joined):
    assert joined({**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) == (1, 1)


def test_the_same_numbers_may_be_given(joined):
    assert joined(SRUN, "trainer.devices=4", "trainer.num_nodes=2") == (4, 2)


def test_other_numbers_are_refused(joined):
    with pytest.raises(UserError, match=r"torchrun has started 8 processes on each of 2 nodes; leave both settings"):
        joined(TORCHRUN, "trainer.devices=4", "trainer.num_nodes=2")


def test_one_command_for_several_tasks_is_refused(joined):
    with pytest.raises(UserError, match=r"has 8 tasks, and one command was started: srun python train\.py"):
        joined({"SLURM_NTASKS": "8", "SLURM_NNODES": "2"})
