"""The folder of the settings, and the functions behind their `${name:...}`. Import this before Hydra composes."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cli.folders import prediction_folder, run_folder
from foundation import stores
from report.quoting import program

CONF = Path(__file__).parent.parent / "conf"


def work_folder(place: str | None, under: str = "outputs") -> str | None:
    """Return the folder of this machine that belongs to a folder or, below `under`, to a bucket."""
    return place and str(stores.working_folder(place, under))


def when(key: str, value: Any, then: Any, otherwise: Any, *, _root_: DictConfig) -> Any:
    """Return `then` if a setting has this value, else `otherwise`."""
    return then if OmegaConf.select(_root_, key) == value else otherwise


def warmup_steps(most: int, max_steps: int) -> int:
    """Return `most`, but at most a tenth of the run, which must reach its learning rate."""
    return min(most, max_steps // 10)


for _resolver in (work_folder, when, warmup_steps, program):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
# Computed once per command, so that the jobs of a sweep share the folder.
for _folder in (run_folder, prediction_folder):
    OmegaConf.register_new_resolver(_folder.__name__, _folder, use_cache=True, replace=True)
