"""The output folder of a command: a new one unless it is named, and never two commands in one."""

import itertools
import os
import shutil
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from cli.resuming import check_resume, newest_run
from cli.terminal import is_first_process, one_line_errors, srun_tasks
from foundation.errors import UserError, without_credentials
from foundation.locks import LOCK, in_use
from runs.run_folder import shorten

# Passes the folder to the other processes of a run, which Lightning starts with the same command line.
INHERITED = "RETOUCH_OUTPUT_DIR"
# Tasks that write to data.cache_dir, not to output_dir.
IN_CACHE_DIR = ("cache", "clean")
# False while a config is only shown (--cfg): then no folder is created.
BEGINS = ContextVar("begins", default=False)


def run_folder(ckpt_path: str | None) -> str:
    """Return the default output_dir of a run: a new folder, or the newest run with ckpt_path=last."""
    if ckpt_path == "last" and is_first_process() and (newest := newest_run()) is not None:
        if BEGINS.get():
            os.environ[INHERITED] = str(newest)
        return str(newest)
    return new_folder("%Y-%m-%d_%H-%M-%S")


def prediction_folder(task: str) -> str:
    return new_folder(f"{'prediction' if task == 'edit' else task}_%Y-%m-%d_%H-%M-%S")


def new_folder(pattern: str) -> str:
    """Create a folder under outputs/ that is named by the time: NAME, or NAME-2, NAME-3, ... if that exists."""
    name = os.path.join("outputs", time.strftime(pattern))
    if not is_first_process():
        return os.environ.get(INHERITED, name)
    if not BEGINS.get():
        return name
    for folder in itertools.chain([name], (f"{name}-{index}" for index in itertools.count(2))):
        try:
            Path(folder).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # reported by `MakeFolder`
            pass
        os.environ[INHERITED] = folder
        return folder
    raise AssertionError


def job_folder() -> Path:
    """Return the output folder of Hydra's job; a ${ in its name is not resolved a second time."""
    runtime: Any = OmegaConf.to_container(HydraConfig.get().runtime)
    return shorten(runtime["output_dir"])


def output_in_use(folder: Path) -> AbstractContextManager[None]:
    """Temporarily keep other commands out of an output folder; only the first process of a command holds the lock."""
    return in_use(folder) if is_first_process() else nullcontext()


def require_empty(folder: Path) -> None:
    """Raise a UserError if a folder, in use by this command, contains anything: it would be replaced as a whole."""
    if any(path.name != LOCK for path in folder.iterdir()):
        raise UserError(f"output_dir={folder} is not empty: choose another folder")


class MakeFolder(Callback):
    """A Hydra callback that creates the folder before Hydra does, whose errors are tracebacks.

    The folder of a sweep is in use until its last job has ended.
    """

    def __init__(self) -> None:
        self._sweep = ExitStack()

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with one_line_errors():
            make_folder(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with one_line_errors():
            if config.hydra.launcher._target_.endswith(".SlurmLauncher") and not shutil.which("sbatch"):
                raise UserError("hydra/launcher=slurm: this machine has no sbatch. Start it on Slurm's login node.")
            self._sweep.enter_context(output_in_use(make_folder(config, "hydra.sweep.dir")))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        self._sweep.close()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Send no lock to a job on another machine."""
        return MakeFolder, ()


def make_folder(config: DictConfig, key: str) -> Path:
    """Create the folder that a setting names.

    Raises:
        UserError: it cannot be created, or each of several processes from outside would choose a folder of its own.
    """
    alone = is_first_process() and os.environ.get("WORLD_SIZE", "1") == "1" and srun_tasks() == 1
    unnamed = OmegaConf.is_interpolation(config, "output_dir") and config.task not in IN_CACHE_DIR
    if unnamed and not alone and INHERITED not in os.environ:
        raise UserError("several processes that the command has not started itself need output_dir=FOLDER")
    if "resume" in config:
        check_resume(config)
    BEGINS.set(True)
    name = config.output_dir
    BEGINS.set(False)
    if not isinstance(name, str):
        raise UserError(f"output_dir={name}: name a folder, or leave it out")
    if "://" in name:
        shown = without_credentials(name)
        raise UserError(
            f"output_dir={shown} is no folder of this machine. Choose one, and copy it: rclone sync FOLDER REMOTE:PATH"
        )
    if "${" in name and "resume" in config:  # `instantiate` resolves settings a second time
        raise UserError(f"output_dir={name}: a run's folder cannot have ${{ in its name. Rename it.")
    folder = Path(OmegaConf.select(config, key))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir={folder} cannot be made ({error.strerror}): choose another folder") from error
    return folder
