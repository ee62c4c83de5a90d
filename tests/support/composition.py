"""Results that the commands of one process would compute again and again: keeping them halves a short run's time.

They are the part of Hydra's work that depends only on the chosen groups, OmegaConf's parse trees, the YAMLs of conf/,
and whether diffusers loads a file of these shapes.
"""

import copy
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import hydra._internal.config_loader_impl as loader
import omegaconf
import omegaconf._utils
import omegaconf.base
import safetensors
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

CONF = f"file://{Path(__file__).parent.parent.parent / 'conf'}"

_results: dict[Hashable, Any] = {}


def _once(key: Hashable, compute: Callable[[], Any]) -> Any:
    """Return a copy of the result of an earlier call with the same key."""
    if key not in _results:
        _results[key] = compute()
    return copy.deepcopy(_results[key])


def _reads_files_of_its_own(repo: Any) -> bool:
    """Return whether configs come from another folder than conf/, whose files a test may change."""
    return any(not source.full_path().startswith((CONF, "pkg://", "structured://")) for source in repo.get_sources())


def keep_compositions() -> None:
    """Make Hydra, in this process, compose each choice of groups once, and OmegaConf read YAML by libyaml."""
    yaml.SafeLoader = yaml.CSafeLoader
    create, compose = loader.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list

    @wraps(create)
    def create_defaults_list(repo, config_name, overrides_list, **how):
        groups = [one for one in overrides_list if one.is_sweep_override() or repo.group_exists(one.key_or_group)]
        if _reads_files_of_its_own(repo) or any(isinstance(one.value(), dict) for one in groups):
            return create(repo, config_name, overrides_list, **how)
        key = (config_name, *how.values(), *(one.input_line for one in groups))
        found = _once(key, lambda: create(repo, config_name, groups, **how))
        found.config_overrides.extend(one for one in overrides_list if one not in groups)
        return found

    @wraps(compose)
    def compose_config(self, defaults, repo):
        if _reads_files_of_its_own(repo):
            return compose(self, defaults, repo)
        return _once(repr([vars(one) for one in defaults]), lambda: compose(self, defaults, repo))

    loader.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_config
    omegaconf.base.parse = omegaconf._utils.parse = cache(omegaconf.base.parse)
    load = OmegaConf.load

    def load_once(path):
        return _once(str(path), lambda: load(path)) if f"file://{path}".startswith(CONF) else load(path)

    OmegaConf.load = staticmethod(load_once)


def known_files() -> mock._patch:
    """Return a patch by which files with equal tensors' names and shapes are loaded by diffusers once."""
    from lightning_modules.lora_files import compatibility

    check, known = compatibility.problem_in_diffusers, _results.setdefault("files", {})

    def check_once(path, deltas, pipeline_name, transformer, format="diffusers"):
        shapes = {
            layer: (type(delta), {name: tensor.shape for name, tensor in delta.tensors().items()})
            for layer, delta in deltas.items()
        }
        with safetensors.safe_open(path, "pt") as file:
            names, scales = sorted(file.keys()), file.metadata().get("lora_adapter_metadata")
        load = getattr(compatibility.loader_of(pipeline_name), "load_lora_weights", None)  # which a test may replace
        key = repr((shapes, names, scales, load, pipeline_name, transformer.config, format))
        if key not in known:
            known[key] = check(path, deltas, pipeline_name, transformer, format)
        return known[key]

    return mock.patch.object(compatibility, "problem_in_diffusers", check_once)
