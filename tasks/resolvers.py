"""The folder of the settings, and the functions behind their `${name:...}`. Import this before Hydra composes."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from datamodules.shards import stores
from tasks.folders import prediction_folder, run_folder

CONF = Path(__file__).parent.parent / "conf"


def work_folder(output_dir: str) -> str:
    """Return the working folder of a run: its output_dir, or a folder under outputs/ for a bucket."""
    return str(stores.working_folder(output_dir, "outputs"))


def local_cache(cache_dir: str | None) -> str | None:
    """Return the folder of this machine that belongs to data.cache_dir."""
    return cache_dir and str(stores.working_folder(cache_dir))


def unless_fp4(usual: float, fp4: float, *, _root_: DictConfig) -> float:
    """Return the second value if the transformer is quantized to fp4, else the first."""
    chosen = OmegaConf.select(_root_, "model.quantization") or {}
    is_fp4 = chosen.get("format") == "fp4" and "transformer" in chosen.get("components_to_quantize", ())
    return fp4 if is_fp4 else usual


def when(key: str, value: Any, then: Any, otherwise: Any, *, _root_: DictConfig) -> Any:
    """Return `then` if a setting has this value, else `otherwise`."""
    return then if OmegaConf.select(_root_, key) == value else otherwise


def warmup_steps(most: int, max_steps: int) -> int:
    """Return `most`, but at most a tenth of the run, which must reach its learning rate."""
    return min(most, max_steps // 10)


for _resolver in (work_folder, local_cache, unless_fp4, when, warmup_steps):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
# Computed once per command, so that the jobs of a sweep share the folder.
for _folder in (run_folder, prediction_folder):
    OmegaConf.register_new_resolver(_folder.__name__, _folder, use_cache=True, replace=True)
