"""Keys of the settings: declared by conf/, read by a task. Every other key is refused, wherever it is given."""

import gc
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from rapidfuzz.distance import OSA

from cli.check_values import OPEN_MAPPINGS
from cli.resolvers import CONF
from foundation.errors import UserError, listing
from report.quoting import flat_settings, program

# Functions by script and task=. They are imported when they are chosen, after the settings have been checked.
TASKS = {
    "train": {"fit": "tasks.fit.fit", "dry_run": "tasks.dry_run.dry_run"},
    "predict": {
        "edit": "tasks.edit.edit",
        "cache": "tasks.caches.cache",
        "preview": "tasks.caches.preview",
        "clean": "tasks.caches.clean",
        "quantize": "tasks.quantize.quantize",
        "inspect": "tasks.inspect.inspect",
        "caption": "tasks.caption.caption",
        "export": "tasks.export.export",
        "average": "tasks.average.average",
        "lora_info": "tasks.lora_info.lora_info",
    },
}
# Files of these groups set values of settings that other files declare.
CHOOSING = ("experiment", "debug", "hparams_search")
# Mappings to which any class may be added by its _target_.
OPEN = ("callbacks", "callbacks.validation.metrics", "logger")

DATA = ("cache", "clean", "preview", "inspect", "caption")
# Tasks of predict.py that read a setting and all below it; the longest name counts, other settings are for all tasks.
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("format", "merge", "merge_weights", "rank", "extract", "fuse", "export"), ("export",)),
    **dict.fromkeys(("lora_scale", "lora_weights", "image", "prompt", "prompts_file"), ("edit",)),
    **dict.fromkeys(("negative_prompt", "guidance_scale", "true_cfg_scale", "num_images_per_prompt"), ("edit",)),
    **dict.fromkeys(("height", "width", "max_area", "batch_size", "shift", "shift_terminal"), ("edit",)),
    "num_inference_steps": ("edit",),
    "lora": ("edit", "export", "average", "lora_info"),
    "average": ("average",),
    "overwrite": ("caption", "export", "average"),
    "delete": ("clean",),
    "captioner": ("caption",),
    "seed": ("edit", *DATA),
    "output_dir": tuple(task for task in TASKS["predict"] if task not in ("cache", "clean")),
    "data": DATA,
    "data.cache_dir": ("edit", "export", "quantize", *DATA),
    "trainer": ("edit", "export", "quantize", *DATA),  # the tasks about one data set accept the same settings
    "model": ("edit", "export", "lora_info", "quantize", *DATA),
    "model.sampling": ("edit", "export"),
    **dict.fromkeys(("model.compile", "model.attention_backend"), ("edit",)),
    "model.vae_encode_mode": ("cache", "clean"),
    **dict.fromkeys(("model.timesteps", "model.recipe", "model.gradient_checkpointing", "model.optimization"), ()),
    **dict.fromkeys(("model.training_adapter", "model.offload.activations", "model.seed"), ()),
    "model.training_guidance_scale": (),
}


class Declared:
    """Settings that the files of conf/ declare for train.py or predict.py.

    Attributes:
        leaves: each setting with a value, and the group options that declare it; "" for the primary config.
        nodes: mappings that contain settings.
        groups: groups, such as `model` and `model/quantization`, and their options.
        may_be_null: groups without an option by default.
    """

    def __init__(self, script: str) -> None:
        self.script = script
        self.leaves: dict[str, list[str]] = {}
        self.groups: dict[str, list[str]] = {}
        self.may_be_null: set[str] = set()
        self._based: set[str] = set()  # options that build on another file
        defaults = self._add(f"{script}.yaml", "", "")
        names = [name for entry in defaults if isinstance(entry, dict) for name in entry if " " not in name]
        for path in sorted(file for name in names for file in (CONF / name).rglob("*.yaml")):
            group = path.parent.relative_to(CONF).as_posix()
            if not path.stem.startswith("_"):
                self.groups.setdefault(group, []).append(path.stem)
            self._add(f"{group}/{path.name}", group, f"{group}={path.stem}")
        # A file that builds on another one declares new settings only for a class, whose arguments are checked.
        added = {key for key, options in self.leaves.items() if self._based.issuperset(options)}
        mappings = {key.rpartition(".")[0] for key in self.leaves.keys() - added}
        for key in added:
            parent = key.rpartition(".")[0]
            if parent in mappings and f"{parent}._target_" not in self.leaves:
                del self.leaves[key]
        self.nodes = {parent for key in self.leaves for parent in _parents(key)}

    def _add(self, name: str, group: str, option: str) -> list[Any]:
        """Add the settings of a file, and return its defaults list."""
        text = (CONF / name).read_text(encoding="utf-8")
        content: dict[str, Any] = yaml.load(text, yaml.CSafeLoader) or {}
        header = re.search(r"^# @package (\S+)", text)
        package = header[1].removeprefix("_global_") if header else group.replace("/", ".")
        defaults = content.pop("defaults", [])
        for entry in defaults:
            if isinstance(entry, dict):
                nulls = [one.removeprefix("override /") for one, value in entry.items() if value is None]
                self.may_be_null.update(f"{group}/{one}".lstrip("/") for one in nulls)
            elif entry != "_self_":
                self._based.add(option)
                if entry.endswith("@_here_"):
                    self._add(f"{entry[1:].removesuffix('@_here_')}.yaml", group, option)
        for key in flat_settings(content, f"{package}." if package else "") if group not in CHOOSING else ():
            if not key.startswith("hydra."):
                self.leaves.setdefault(key, []).append(option)
        return defaults

    def knows(self, key: str) -> bool:
        """Return whether a key is a setting, a mapping of settings, or part of a value such as adapter.rank_pattern."""
        return key in self.leaves or key in self.nodes or any(key.startswith(f"{one}.") for one in OPEN_MAPPINGS)

    def takes_arguments(self, key: str) -> bool:
        """Return whether a key is below a class, whose other arguments may be set, or where classes may be added."""
        return any(one in OPEN or f"{one}._target_" in self.leaves for one in _parents(key))

    def nearest(self, key: str) -> str | None:
        """Return the setting with the most similar name, None if none is similar."""
        names = [name for name in (*self.leaves, *self.nodes, *self.groups) if "._" not in name]
        in_branch = key.replace("/", ".").rpartition(".")[0] in self.nodes
        least, _, found = min((_unlikeness(key, name, in_branch), name.count("."), name) for name in names)
        return found if least < math.inf else None

    def refuse(self, key: str, added: bool = False) -> NoReturn:
        """Raise a UserError for a key that is no setting, naming the nearest one; it may have been `added` by a +."""
        near, parent = self.nearest(key), key.replace("/", ".").rpartition(".")[0]
        hints = [f"Did you mean {near}?"] if near is not None else []
        for other in TASKS.keys() - {self.script}:
            if declared(other).knows(key) and not self.knows(key) and (near is None or _unlikeness(key, near) > 1):
                hints = [f"It is a setting of {other}.py."]
        if near is None and parent in self.nodes:
            parts = {name.rpartition(".")[::2] for name in (*self.leaves, *self.nodes) if "._" not in name}
            hints.append(f"{parent} has {listing(sorted(own for place, own in parts if place == parent), 12)}.")
        if not added and self.takes_arguments(key) and (near is None or _unlikeness(key, near) > 1):
            hints.append(f"An argument that conf/ leaves out needs a +: +{key}=VALUE.")
        listed = f"`{program(self.script)} --help` names those that people change most, --cfg job all of them."
        raise UserError(f"{key}: there is no such setting. {' '.join(hints) or listed}")


@cache
def declared(script: str) -> Declared:
    """Return the settings that conf/ declares; its files are read once."""
    return Declared(script)


def check_keys(cfg: DictConfig, script: str) -> None:
    """Compare the keys of a composed config with those of conf/.

    An argument that conf/ leaves out of a class that it names is compared with the class's signature.

    Raises:
        UserError: a key would not be read.
    """
    known, values = declared(script), flat_settings(cast(dict[str, Any], OmegaConf.to_container(cfg)))
    for key in values:
        if known.knows(key):
            if key in known.nodes and key not in known.leaves and values[key] not in (None, {}):
                raise UserError(f"{key}={values[key]}: this is a group of settings. Set {key}.NAME=VALUE.")
            parent = key.rpartition(".")[0]
            if f"{parent}._target_" in known.leaves and f"{parent}._target_" not in values:
                group = parent.replace(".", "/")
                hint = f"Choose {group}=NAME first: {', '.join(known.groups.get(group, ()))}."
                raise UserError(f"{key}: nothing would read it without {parent}._target_. {hint}")
            continue
        holders = (one for one in reversed(_parents(key)) if one in known.nodes or one.rpartition(".")[0] in OPEN)
        holder = next(holders, "")
        target, name = values.get(f"{holder}._target_"), key.removeprefix(f"{holder}.").partition(".")[0]
        arguments = {} if target is None else _arguments(target)
        if name in arguments or (target is not None and name.startswith("_")):
            continue
        near = known.nearest(own := f"{holder}.{name}" if holder else key)
        if target is None or (near is not None and (near.startswith(f"{holder}.") or OSA.distance(own, near) <= 2)):
            known.refuse(key, added=True)
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
        name = override.lstrip("+").partition("=")[0].partition("@")[0]
        key = name.replace("/", ".")
        tasks = next((READ_BY[one] for one in (key, *reversed(_parents(key))) if one in READ_BY), (task,))
        if task not in tasks:
            whose = f"of task={listing(list(tasks))}" if tasks else "of train.py"
            raise UserError(f"{name} has no effect with task={task}: it is a setting {whose}. Leave it out.")


def _parents(key: str) -> list[str]:
    """Return the mappings that contain a key, the outermost first."""
    return [key[: match.start()] for match in re.finditer(r"\.", key)]


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
