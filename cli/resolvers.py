"""The functions behind their `${name:...}`. Import this before Hydra composes."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cli.folders import prediction_folder, run_folder
from foundation import stores
from foundation.settings import ASSETS, declared
from foundation.settings import CONF as CONF
from report.quoting import program


def work_folder(place: str | None) -> str | None:
    """Return the folder of this machine that belongs to a folder or, below cache/, to a bucket."""
    return place and str(stores.working_folder(place))


def asset(name: str) -> str:
    """Return a folder of assets/, from here if it is below."""
    path = ASSETS / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def when(key: str, value: Any, then: Any, otherwise: Any, *, _root_: DictConfig) -> Any:
    """Return `then` if a setting has this value, else `otherwise`."""
    return then if OmegaConf.select(_root_, key) == value else otherwise


def warmup_steps(most: int, max_steps: int) -> int:
    """Return `most`, but at most a tenth of the run, which must reach its learning rate."""
    return min(most, max_steps // 10)


def listed_settings(script: str) -> str:
    """Return the lines of --help about the settings that people change most."""
    firsts = {key: re.split(r"(?<=\.) ", one.help)[0] for key, one in declared(script).listed().items()}
    return "\n".join(f"  {key:37} {line.removesuffix('.')}" for key, line in firsts.items())


for _resolver in (work_folder, asset, when, warmup_steps, program, listed_settings):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
# Computed once per command, so that the jobs of a sweep share the folder.
for _folder in (run_folder, prediction_folder):
    OmegaConf.register_new_resolver(_folder.__name__, _folder, use_cache=True, replace=True)
