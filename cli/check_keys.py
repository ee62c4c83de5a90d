"""Keys of the settings: declared by conf/, read by a task. Every other key is refused, wherever it is given."""

import gc
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf
from rapidfuzz.distance import OSA

from foundation.errors import UserError, listing
from foundation.settings import OPEN, Declared, declared, flat_settings, parents
from report.quoting import key_of, program

# Functions by script and task=. They are imported when they are chosen, after the settings have been checked.
TASKS = {
    "train": {"fit": "tasks.fit.fit", "dry_run": "tasks.dry_run.dry_run"},
    "predict": {
        "edit": "tasks.edit.edit",
        "cache": "tasks.caches.cache",
        "preview": "tasks.caches.preview",
        "clean": "tasks.caches.clean",
        "quantize": "tasks.quantize.quantize",
        "inspect": "extras.inspect.inspect",
        "caption": "extras.caption.caption",
        "export": "tasks.export.export",
        "average": "extras.average.average",
        "lora_info": "tasks.lora_info.lora_info",
    },
}


def nearest(known: Declared, key: str) -> str | None:
    """Return the setting with the most similar name, None if none is similar."""
    names = [name for name in (*known.settings, *known.nodes, *known.groups) if "._" not in name]
    in_branch = key.replace("/", ".").rpartition(".")[0] in known.nodes
    least, _, found = min((_unlikeness(key, name, in_branch), name.count("."), name) for name in names)
    return found if least < math.inf else None


def refuse(known: Declared, key: str, added: bool = False) -> NoReturn:
    """Raise a UserError for an unknown key, naming the nearest setting; the key may have been `added` by a +."""
    near, parent = nearest(known, key), key.replace("/", ".").rpartition(".")[0]
    hints = [f"Did you mean {near}?"] if near is not None else []
    for other in TASKS.keys() - {known.script}:
        if declared(other).knows(key) and not known.knows(key) and (near is None or _unlikeness(key, near) > 1):
            hints = [f"It is a setting of {other}.py."]
    if near is None and parent in known.nodes:
        parts = {name.rpartition(".")[::2] for name in (*known.settings, *known.nodes) if "._" not in name}
        hints.append(f"{parent} has {listing(sorted(own for place, own in parts if place == parent), 12)}.")
    if not added and known.takes_arguments(key) and (near is None or _unlikeness(key, near) > 1):
        hints.append(f"An argument that conf/ leaves out needs a +: +{key}=VALUE.")
    listed = f"`{program(known.script)} --help` names those that people change most, --cfg job all of them."
    raise UserError(f"{key}: there is no such setting. {' '.join(hints) or listed}")


def check_keys(cfg: DictConfig, script: str) -> None:
    """Compare the keys of a composed config with those of conf/.

    An argument that conf/ leaves out of a class that it names is compared with the class's signature.

    Raises:
        UserError: a key would not be read.
    """
    known, values = declared(script), flat_settings(cast(dict[str, Any], OmegaConf.to_container(cfg)))
    for key in values:
        if known.knows(key):
            if key in known.nodes and key not in known.settings and values[key] not in (None, {}):
                raise UserError(f"{key}={values[key]}: this is a group of settings. Set {key}.NAME=VALUE.")
            parent = key.rpartition(".")[0]
            if f"{parent}._target_" in known.settings and f"{parent}._target_" not in values:
                group = parent.replace(".", "/")
                hint = f"Choose {group}=NAME first: {', '.join(known.groups.get(group, ()))}."
                raise UserError(f"{key}: nothing would read it without {parent}._target_. {hint}")
            continue
        holders = (one for one in reversed(parents(key)) if one in known.nodes or one.rpartition(".")[0] in OPEN)
        holder = next(holders, "")
        target, name = values.get(f"{holder}._target_"), key.removeprefix(f"{holder}.").partition(".")[0]
        arguments = {} if target is None else _arguments(target)
        if name in arguments or (target is not None and name.startswith("_")):
            continue
        near = nearest(known, own := f"{holder}.{name}" if holder else key)
        if target is None or (near is not None and (near.startswith(f"{holder}.") or OSA.distance(own, near) <= 2)):
            refuse(known, key, added=True)
        if not any(one.kind is one.VAR_KEYWORD for one in arguments.values()):
            like = closest(name, arguments, 2)
            hint = f" Did you mean {holder}.{like}?" if like is not None else ""
            raise UserError(f"{key}: {target} has no argument {name}.{hint}")


def _arguments(target: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class or function; if it has no signature, any argument."""
    from hydra.utils import get_object

    try:
        return inspect.signature(get_object(target)).parameters
    except (ImportError, TypeError, ValueError):  # it cannot be imported, which `instantiate` reports; written in C
        return inspect.signature(lambda **_: None).parameters


def chosen_task(task: str, script: str) -> str:
    """Return the full name of the function for task=, or raise a UserError if the script has no such task."""
    tasks = TASKS[script]
    if task in tasks:
        return tasks[task]
    near = closest(str(task), tasks, 2)
    hint = f"Did you mean {near}?" if near else f"Choose {', '.join(tasks)}."
    for other in TASKS.keys() - {script}:
        hint = f"It is a task of {other}.py." if task in TASKS[other] else hint
    raise UserError(f"task={task}: there is no such task of {script}.py. {hint}")


def import_task(name: str) -> Callable[[DictConfig, Path], Any]:
    """Import the function of a task.

    Imports create a million objects and no garbage: the collector would take a quarter of the time to find none.
    """
    from hydra.utils import get_method

    gc.disable()
    try:
        return get_method(name)
    finally:
        if not gc.get_freeze_count():  # later a model may be loaded, which would never be freed
            gc.freeze()
        gc.enable()


def closest(word: str, others: Iterable[str], most: float) -> str | None:
    """Return the word that differs from this one in the fewest letters, None if in more than `most`."""
    found = min(others, key=lambda other: OSA.distance(word, other), default=None)
    return found if found is not None and OSA.distance(word, found) <= most else None


def check_read(task: str, overrides: Sequence[str]) -> None:
    """Raise a UserError for a setting on the command line that a task of predict.py does not read."""
    for override in overrides:
        if override.startswith("~"):  # such as captioner=null
            continue
        name = key_of(override)
        key = name.replace("/", ".")
        tasks = declared("predict").readers_of(key)
        if tasks is not None and task not in tasks:
            whose = f"of task={listing(list(tasks))}" if tasks else "of train.py"
            raise UserError(f"{name} has no effect with task={task}: it is a setting {whose}. Leave it out.")


def _unlikeness(key: str, name: str, in_branch: bool = False) -> float:
    """Return the number of different letters, or that in the last parts and a little more; infinite if not similar."""
    key, name = key.replace("/", "."), name.replace("/", ".")
    (before, _, own), (place, _, its) = key.rpartition("."), name.rpartition(".")
    more = 0 if before == place else 1.1 if before else 0.5
    if in_branch and more and (own != its or name.count(".") > key.count(".") + 1):
        return math.inf  # a name from elsewhere misleads
    words, theirs = ({word.removesuffix("s") for word in one.split("_")} for one in (own, its))
    alike = words <= theirs or (theirs < words and len(theirs) > 1)
    others = {*own.split("_")} ^ {*its.split("_")}  # as num_inference in num_inference_steps for steps
    found = [
        (OSA.distance(key, name), max(1.5, len(key if more else own) / 5)),
        (OSA.distance(own, its) + more, max(1.5, len(own) / 5 + more)),
        (2 + len(others) / 10 + more, math.inf if alike else 0),
    ]
    return min((letters for letters, most in found if letters <= most), default=math.inf)
