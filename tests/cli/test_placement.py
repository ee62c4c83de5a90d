"""Devices and nodes follow the processes that torchrun or srun started."""

import re

import pytest

from cli.placement import join_processes, require_card
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


CU126 = "for CUDA 12.6 (cu126, pytorch.org/get-started)"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the card, the driver and the build of PyTorch."""

    def machine(driver="", cuda="13.0", capability=None, error="Found no NVIDIA driver on your system. Please check"):
        def init():
            raise RuntimeError(error)

        monkeypatch.setattr("cli.placement._driver", lambda: driver)
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr("torch.cuda.init", init)
        monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GTX 1080")
        monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_120", "compute_120"])

    return machine


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "Found no NVIDIA driver on your system. Without one: "),
        (
            {"driver": "550.54.15", "error": TOO_OLD},
            "driver 550.54.15 is too old for CUDA 13.0 (The NVIDIA driver on your",
        ),
        ({"driver": "550.54.15", "error": TOO_OLD}, f"Update the driver, or: Install PyTorch 2.14.1 {CU126}"),
        (
            {"driver": "470.82", "cuda": "12.6", "error": TOO_OLD},
            "too old (found version 12040)). Update the driver.",
        ),
        ({"driver": "580.65", "error": "No CUDA GPUs are available"}, "No CUDA GPUs are available. Without one: "),
        ({"cuda": None}, "is built without CUDA. Install another build"),
        (
            {"driver": "580.65", "capability": (6, 1)},
            "GTX 1080 has compute capability 6.1, and PyTorch 2.14.1+cu130 starts",
        ),
    ],
)
def test_a_large_model_without_a_usable_card_stops_with_the_reason_and_the_fix(machine, facts, words):
    machine(**facts)
    for overrides in (
        ["model=flux_kontext"],
        ["trainer.accelerator=gpu"],
        ["model=z_image", "trainer.accelerator=cuda"],
    ):
        with pytest.raises(UserError, match=re.escape(words)) as caught:
            require_card(compose("train", "data.root=x", *overrides))
    assert str(caught.value).startswith("trainer.accelerator=cuda: PyTorch finds no GPU that it can use. ")


def test_other_machines_choices_and_small_models_are_left_alone(machine, repositories, tmp_path):
    machine()
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.truncate(4 * 10**9)
    for overrides in (
        [],
        ["model=flux_kontext", "trainer.accelerator=cpu"],
        ["model=flux_kontext", "model.devices.transformer=cpu"],
        ["model=flux_kontext", f"model.pretrained_model_name_or_path={repositories['flux_kontext']}"],
    ):
        require_card(compose("train", "data.root=x", *overrides))
    tiny = f"model.pretrained_model_name_or_path={repositories['flux_kontext']}"
    for overrides in ([f"model.transformer_name_or_path={large}"], ["model.transformer_name_or_path=owner/name"]):
        with pytest.raises(UserError, match="needs a GPU: PyTorch finds no GPU that it can use"):
            require_card(compose("predict", "model=flux_kontext", tiny, *overrides))
    machine(driver="580.65", capability=(7, 5))
    require_card(compose("train", "model=flux_kontext", "data.root=x"))


def test_a_large_model_stops_before_it_downloads(run, pairs, tmp_path):
    settings = ["model=flux_kontext", f"data.root={pairs}", f"output_dir={tmp_path / 'run'}"]
    outcome = run("train", *settings, ok=False)
    assert "black-forest-labs/FLUX.1-Kontext-dev needs a GPU: PyTorch finds no GPU that it can use. " in outcome.error
    assert "huggingface.co" not in outcome.text
    request = ["model=flux_kontext", "prompt=x", "image=x.png", f"output_dir={tmp_path / 'out'}"]
    assert "needs a GPU" in run("predict", *request, ok=False).error


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
