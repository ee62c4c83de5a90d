"""Private names of Hydra 1.3, OmegaConf 2.3, Lightning 2.6 and torch 2.14: check them at each update."""

from pathlib import Path
from typing import Any

import hydra._internal.utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra._internal.utils import get_args_parser as get_args_parser  # Hydra's options, for `cli.arguments`
from hydra.core.utils import JobReturn
from hydra.types import RunMode
from omegaconf._utils import get_yaml_loader

# OmegaConf's patterns of numbers and other plain values, for a faster loader of YAML.
YAML_RESOLVERS = get_yaml_loader().yaml_implicit_resolvers
SET_VALUE = JobReturn.__dict__["return_value"].fset


def raise_hydras_errors() -> None:
    """Make hydra.main raise its errors and those of jobs, instead of printing them with its own words and exiting."""
    hydra._internal.utils.run_and_report = lambda func: func()
    JobReturn.return_value = property(_value_of, SET_VALUE)  # type: ignore[method-assign, assignment]


def _value_of(job: JobReturn) -> Any:
    if isinstance(result := result_of(job), Exception):
        raise result
    return result


def compose_settings(folder: Path, name: str, overrides: list[str]) -> Any:
    """Compose a config with Hydra's own settings; hydra.compose omits these and keeps state that all threads share."""
    return ConfigLoaderImpl(create_config_search_path(str(folder))).load_configuration(name, overrides, RunMode.RUN)


def result_of(job: JobReturn) -> Any:
    """Return the value of a job of a sweep, or the exception of a failed one, which `return_value` raises."""
    return job._return_value


def trainer_of(module: Any) -> Any:
    """Return the trainer of a LightningModule; None outside of one, where `module.trainer` raises an error."""
    return module._trainer


def train_without_steps(trainer: Any) -> None:
    """Make `fit` call on_train_start and on_train_end although no step is left; Lightning would skip them."""
    trainer.fit_loop.__class__ = type("FitLoop", (type(trainer.fit_loop),), {"skip": False})


def ignore_sigterm(trainer: Any) -> None:
    """Keep Lightning from exchanging its own note of SIGTERM in each batch, which waits for the device."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def resume_at(checkpoint: dict[str, Any], batch: int) -> None:
    """Make a loaded checkpoint resume at this batch, such as the start of an accumulation window."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counter in (progress["total"], progress["current"]):
        counter.update(dict.fromkeys(counter, batch))


def default_store() -> Any:
    """Return the key-value store that the processes of a run share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
