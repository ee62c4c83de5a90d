"""The device and processes of a task, the requeueing of its Slurm job, and the model of a task that trains nothing."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from cli.terminal import is_first_process, machine_count, srun_tasks
from foundation.errors import UserError
from report.quoting import program
from runs.signals import BEFORE_THE_END, Stopped

# Bytes of weights beyond which a model is not run on a CPU unasked: smaller ones compute a step in seconds.
SLOW_ON_CPU = 3e9
# The oldest drivers of NVIDIA by the major version of CUDA (its release notes, "minor version compatibility").
DRIVERS = {"12": 525, "13": 580}

if TYPE_CHECKING:
    import torch


def join_processes(cfg: DictConfig) -> None:
    """Set devices and nodes to torchrun's or srun's processes; raise a UserError if settings contradict them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher, count = "torchrun", int(os.environ["WORLD_SIZE"])
    else:
        launcher, count = "srun", srun_tasks()
        tasks = int(os.environ.get("SLURM_NTASKS", 1))
        if tasks > count == 1 and "resume" in cfg:  # it trains; other commands may run alone
            raise UserError(f"the job has {tasks} tasks, and one command was started: srun {program('train')} ...")
    if count == 1:
        return
    nodes = machine_count()
    devices = count // nodes
    if cfg.trainer.devices in (1, "auto") and cfg.trainer.num_nodes == 1:
        cfg.trainer.devices, cfg.trainer.num_nodes = devices, nodes
    if (cfg.trainer.devices, cfg.trainer.num_nodes) != (devices, nodes):
        raise UserError(
            f"trainer.devices={cfg.trainer.devices} trainer.num_nodes={cfg.trainer.num_nodes}: {launcher} has started "
            f"{devices} processes on each of {nodes} nodes; leave both settings out"
        )


def place_trainer(cfg: DictConfig) -> None:
    """Make the trainer use all processes, and the device of model.devices.transformer if it is set."""
    from lightning_modules.pretrained.repository import resolve_device

    join_processes(cfg)
    device = cfg.model.devices.transformer
    if resolve_device(device, "model.devices.transformer") is None:
        return
    if cfg.trainer.devices != 1:
        raise UserError(f"model.devices.transformer={device} and trainer.devices={cfg.trainer.devices}: choose one")
    kind, _, index = device.partition(":")
    cfg.trainer.accelerator = {"cuda": "gpu"}.get(kind, kind)
    cfg.trainer.devices = [int(index or 0)] if kind == "cuda" else 1


def require_card(cfg: DictConfig) -> None:
    """Raise a UserError for a large model without a usable GPU, before anything is downloaded.

    trainer.accelerator=cpu and model.devices.transformer are choices, and are left alone.
    """
    base, other = cfg.model.pretrained_model_name_or_path, cfg.model.transformer_name_or_path
    asked = cfg.trainer.accelerator
    needed = asked in ("cuda", "gpu") or (asked == "auto" and any(map(_is_large, filter(None, (base, other)))))
    if needed and cfg.model.devices.transformer is None and (why := why_no_card()):
        what = f"{other or base} needs a GPU" if asked == "auto" else f"trainer.accelerator={asked}"
        raise UserError(f"{what}: PyTorch finds no GPU that it can use. {why}")


def _is_large(name: str) -> bool:
    """Return whether a base takes hours on a CPU: all on the hub, and local files of more than `SLOW_ON_CPU` bytes."""
    from lightning_modules.pretrained.repository import EMBEDDED

    path = Path(name).expanduser()
    files = [path] if path.is_file() else path.rglob("*.safetensors") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files) > SLOW_ON_CPU if path.exists() else name != EMBEDDED


def why_no_card() -> str:
    """Return why PyTorch cannot use a GPU of this machine and what to do; empty if it can."""
    import torch

    if torch.backends.mps.is_available():
        return ""
    built = torch.version.cuda or torch.version.hip
    older = f"Install PyTorch {torch.__version__.partition('+')[0]} for CUDA 12.6 (cu126, pytorch.org/get-started)"
    if not built:
        return f"PyTorch {torch.__version__} is built without CUDA. Install another build from pytorch.org/get-started."
    if torch.cuda.is_available():
        oldest = min((int(arch[3:]) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")), default=0)
        major, minor = torch.cuda.get_device_capability()
        if torch.version.hip or 10 * major + minor >= oldest:
            return ""
        card = f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}"
        return f"{card}, and PyTorch {torch.__version__} starts at {oldest / 10:.1f}. {older}, or use another card."
    try:
        torch.cuda.init()
        cause = "no GPU is visible"
    except (RuntimeError, AssertionError) as error:
        cause = str(error).partition(". ")[0].partition("\n")[0].rstrip(".")
    version = int((driver := _driver()).partition(".")[0] or 0)
    if 0 < version < DRIVERS.get(built.partition(".")[0], 0):
        other = f", or: {older}" if version >= DRIVERS["12"] else ""
        return f"driver {driver} is too old for CUDA {built} ({cause}). Update the driver{other}."
    return (
        f"{cause}. Without one: {program('train')} alone trains the embedded model, task=dry_run plans this run, and "
        "trainer.accelerator=cpu trains it, in days."
    )


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty without one."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def compute_device(cfg: DictConfig) -> "torch.device":
    """Return the trainer's device, for a task that runs without one."""
    from hydra.utils import instantiate

    place_trainer(cfg)
    return instantiate(cfg.trainer, logger=False).strategy.root_device


def frozen_model(cfg: DictConfig) -> Any:
    """Build the model without adapter and optimizer; nothing is loaded."""
    from hydra.utils import instantiate

    return instantiate(cfg.model, adapter=None, optimization=None, _convert_="all")


@contextmanager
def queued_again(resume: str | None) -> Iterator[None]:
    """Requeue the job, in the first process, if one of the signals of `BEFORE_THE_END` stops the block.

    Lightning would requeue it with a checkpoint of its own; submitit with a pickle. Both leave signals alone that have
    a handler.

    Args:
        resume: auto; otherwise the restarted job would only be refused.
    """
    try:
        yield
    except Stopped as stopped:
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and stopped.signal in BEFORE_THE_END and is_first_process():
            stopped.add_note(_requeue(job) if resume else f"job {job} is not queued again: that takes resume=auto")
        raise


def _requeue(job: str) -> str:
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    name = job if array is None else f"{array}_{task}"
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return f"there is no scontrol here: queue it again by scontrol requeue {name}"
    done = subprocess.run([scontrol, "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"scontrol requeue {name} failed: {done.stderr.strip() or f'status {done.returncode}'}"
    return f"job {name} is queued again"
