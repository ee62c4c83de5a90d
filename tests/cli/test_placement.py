"""Devices and nodes follow the processes that torchrun or srun started."""

import pytest

from cli.placement import join_processes
from foundation.errors import UserError
from tests.support.commands import compose

TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "edit", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
SBATCH |= {"SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SALLOC = {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}  # its shell is a step of one task
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
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, [], (2, 1)),
        ({}, [], (1, 1)),
    ],
)
def test_devices_and_nodes_are_those_that_were_started(joined, environment, overrides, expected):
    assert joined(environment, overrides) == expected


@pytest.mark.parametrize(
    ("environment", "overrides", "message"),
    [
        (TORCHRUN, FOUR_BY_TWO, r"torchrun has started 8 processes on each of 2 nodes; leave both settings"),
        (SALLOC, [], r"has 4 tasks, and one command was started: srun python train\.py"),
        ({"SLURM_NTASKS": "8"}, [], r"has 8 tasks, and one command was started: srun python train\.py"),
    ],
)
def test_contradictions_are_refused(joined, environment, overrides, message):
    with pytest.raises(UserError, match=message):
        joined(environment, overrides)


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (SBATCH, "predict prompt=a width=32 height=32 num_inference_steps=1"),
        (SALLOC, "predict prompt=a width=32 height=32 num_inference_steps=1"),
        ({"SLURM_NTASKS": "4"}, "predict task=preview data.root={pairs}"),
        (SBATCH, "train task=dry_run data.root={pairs}"),
    ],
)
def test_commands_without_srun_run_alone_in_an_allocation(run, monkeypatch, tmp_path, pairs, environment, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETOUCH_OUTPUT_DIR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run(*command.format(pairs=pairs).split())
