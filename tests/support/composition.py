"""Compose configs quickly: the part of Hydra's work that depends only on the chosen groups is done once and copied.

Of the 0.16 s that Hydra takes to compose a config, this leaves 0.03 s.
"""

import copy
from collections.abc import Callable, Hashable
from functools import wraps
from pathlib import Path
from typing import Any

import hydra._internal.config_loader_impl as loader
from hydra._internal.config_loader_impl import ConfigLoaderImpl

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
    """Make Hydra, in this process, compose each choice of groups once."""
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
