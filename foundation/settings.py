"""The settings as conf/ declares them: each with its kind, range, readers and help, in comments next to its default.

    #: Samples per step.
    batch_size: 4  # int >= 1; task=edit

`#:` lists a setting in --help, by its first sentence, and on the page. The comment behind a value is a rule: `int`,
`float`, `bool`, `text` or `path`, its bounds, and alternatives (`or null`, `or list`, `or auto`; `list of float`: no
number alone). Behind the semicolon are the tasks of predict.py that read the setting and all below it, or `train.py`
for none of them. `a value sets NAME` behind a mapping: KEY=VALUE stands for KEY.NAME=VALUE.
"""

import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).parents[1] / "conf"
ASSETS = CONF.parent / "assets"
SCRIPTS = ("train", "predict", "studio")
# Files of these groups set values of settings that other files declare.
CHOOSING = ("experiment", "debug", "hparams_search")
# Mappings to which any class may be added by its _target_.
OPEN = ("callbacks", "callbacks.validation.metrics", "logger")
# The order of the listed settings; those of the script's own file come last.
HEADINGS = ("data", "model", "adapter", "objective", "optimizer", "trainer")
KIND = re.compile(r"((list|mapping) of (\d+ )?)?(int|float|bool|text|path)\b")
REST = re.compile(r"((?:,? (?:>=|<=|>) [-\d.e]+)*)(?:, multiple of (\d+))?((?: or \w+)*)")
STANDS_FOR = re.compile(r"a value sets (\w+)")
READERS = re.compile(r"(?:^|; )(?:(train\.py)|task=([\w, ]+))$")
BOUNDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt}
LITERALS = {"null": None, "true": True, "false": False}
CONTAINERS = {"list": list, "mapping": dict}


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have.

    Attributes:
        kind: int, float, bool, text or path.
        bounds: comparisons of a number, as [(">=", 1)].
        multiple: a divisor of the number.
        also: alternatives to a value: words; None; list, of values; dict, of patterns to values.
        alone: whether a value itself is allowed.
        length: required length of a list; 0 for any but an empty one.
    """

    kind: str
    bounds: tuple[tuple[str, float], ...] = ()
    multiple: int = 1
    also: tuple[Any, ...] = ()
    alone: bool = True
    length: int = 0

    @classmethod
    def parse(cls, comment: str) -> "Rule | None":
        """Return the rule in the comment behind a value; None without one."""
        if (kind := KIND.match(comment)) is None:
            return None
        if (rest := REST.fullmatch(comment.partition(";")[0][kind.end() :])) is None:
            raise ValueError(f"not a rule: {comment}")
        bounds = tuple((sign, float(bound)) for sign, bound in re.findall(r"([<>=]+) (\S+?)(?=,|$| )", rest[1]))
        words = [*re.findall(r"\bor (\w+)", rest[3]), *filter(None, [kind[2]])]
        also = tuple({**LITERALS, **CONTAINERS}.get(word, word) for word in words)
        return cls(kind[4], bounds, int(rest[2] or 1), also, not kind[2], int(kind[3] or 0))

    def allows(self, value: Any) -> bool:
        """Return whether a setting may have this value."""
        if type(value) in self.also:
            right_length = len(value) == self.length if self.length else bool(value)
            values = value.values() if isinstance(value, dict) else value
            return self.is_text or (right_length and all(map(self._is_one, values)))
        return value in self.also or (self.alone and self._is_one(value))

    @property
    def takes_keys(self) -> bool:
        """Whether a value may be a mapping, whose keys are part of it: patterns or roles."""
        return dict in self.also

    @property
    def is_text(self) -> bool:
        """Whether a value is text or a path, which Hydra must not parse."""
        return self.kind in ("text", "path")

    def _is_one(self, value: Any) -> bool:
        if self.is_text or self.kind == "bool":
            return isinstance(value, str if self.is_text else bool)
        if isinstance(value, bool) or not isinstance(value, int if self.kind == "int" else int | float):
            return False
        in_range = all(BOUNDS[sign](value, bound) for sign, bound in self.bounds)
        return math.isfinite(value) and in_range and (self.multiple == 1 or value % self.multiple == 0)

    def __str__(self) -> str:
        kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "path": "a path"}
        kind, bounds = kinds.get(self.kind, self.kind), dict(self.bounds)
        if self.multiple > 1:
            kind += f", a multiple of {self.multiple},"
        if ">" in bounds or ">=" in bounds:
            kind += f" above {bounds['>']:g}" if ">" in bounds else f" from {bounds['>=']:g}"
            kind += f" to {bounds['<=']:.10g}" if "<=" in bounds else "" if ">" in bounds else " on"
        thing = "TEXT" if self.is_text else "NUMBER"
        literals = {value: word for word, value in LITERALS.items()}
        names = {list: f"a list of {self.length or 'them'}", dict: f"a mapping {{PATTERN:{thing}}}"}
        others = " or ".join(names.get(one, literals.get(one, one)) for one in self.also)
        if not self.alone:
            return f"{others} with {kind} each"
        return f"{kind} or {others}" if others else kind


@dataclass
class Setting:
    """A setting.

    Attributes:
        options: the group options that declare it; "" for the primary config.
        rule: None if the class that reads it checks it.
        help: the comment above its default.
        is_listed: whether --help and the page list it.
    """

    options: list[str] = field(default_factory=list)
    rule: Rule | None = None
    help: str = ""
    is_listed: bool = False


class Declared:
    """Settings that the files of conf/ declare for train.py, predict.py or studio.py.

    Attributes:
        settings: by key.
        readers: the tasks of predict.py that read a setting or all of a mapping; others are read by all tasks.
        nodes: mappings that contain settings.
        groups: groups, such as `model` and `model/quantization`, and their options.
        may_be_null: groups without an option by default.
        firsts: the settings for which a value of their mappings stands.
    """

    def __init__(self, script: str) -> None:
        self.script = script
        self.settings: dict[str, Setting] = {}
        self.readers: dict[str, tuple[str, ...]] = {}
        self.groups: dict[str, list[str]] = {}
        self.may_be_null: set[str] = set()
        self.firsts: dict[str, str] = {}
        self._based: set[str] = set()  # options that build on another file
        defaults = self._add(f"{script}.yaml", "", "")
        names = [name for entry in defaults if isinstance(entry, dict) for name in entry if " " not in name]
        for path in sorted(file for name in names for file in (CONF / name).rglob("*.yaml")):
            group = path.parent.relative_to(CONF).as_posix()
            if not path.stem.startswith("_"):
                self.groups.setdefault(group, []).append(path.stem)
            self._add(f"{group}/{path.name}", group, f"{group}={path.stem}")
        # A file that builds on another one declares new settings only for a class, whose arguments are checked.
        added = {key for key, one in self.settings.items() if self._based.issuperset(one.options)}
        mappings = {key.rpartition(".")[0] for key in self.settings.keys() - added}
        for key in added:
            parent = key.rpartition(".")[0]
            if parent in mappings and f"{parent}._target_" not in self.settings:
                del self.settings[key]
        self.nodes = {parent for key in self.settings for parent in parents(key)}

    def _add(self, name: str, group: str, option: str) -> list[Any]:
        """Add the settings of a file, and return its defaults list."""
        package, defaults, lines = _read(CONF / name)
        package = group.replace("/", ".") if package is None else package
        for entry in defaults:
            if isinstance(entry, dict):
                nulls = [one.removeprefix("override /") for one, value in entry.items() if value is None]
                self.may_be_null.update(f"{group}/{one}".lstrip("/") for one in nulls)
            elif entry != "_self_":
                self._based.add(option)
                if entry.endswith("@_here_"):
                    self._add(f"{entry[1:].removesuffix('@_here_')}.yaml", group, option)
        for key, is_setting, above, behind in lines if group not in CHOOSING else ():
            key = f"{package}.{key}" if package else key
            if readers := READERS.search(behind):
                self.readers[key] = () if readers[1] else tuple(readers[2].split(", "))
            if first := STANDS_FOR.match(behind):
                self.firsts[key] = f"{key}.{first[1]}"
            if is_setting:
                one = self.settings.setdefault(key, Setting())
                one.options.append(option)
                one.rule = one.rule or Rule.parse(behind)
                is_listed = above.startswith(":") and (not option or self.script == "train")
                one.help = above.removeprefix(": ") if is_listed or not one.help else one.help
                one.is_listed |= is_listed
        return defaults

    def knows(self, key: str) -> bool:
        """Return whether a key is a setting, a mapping of settings, or part of a value such as adapter.rank_pattern."""
        holders = [(one, self.settings[one].rule) for one in parents(key) if one in self.settings]
        takes_keys = (one in self.firsts.values() or (rule and rule.takes_keys) for one, rule in holders)
        return key in self.settings or key in self.nodes or any(takes_keys)

    def takes_arguments(self, key: str) -> bool:
        """Return whether a key is below a class, whose other arguments may be set, or where classes may be added."""
        return any(one in OPEN or f"{one}._target_" in self.settings for one in parents(key))

    def readers_of(self, key: str) -> tuple[str, ...] | None:
        """Return the tasks of predict.py that read a setting; None for all."""
        return next((self.readers[one] for one in (key, *reversed(parents(key))) if one in self.readers), None)

    def listed(self) -> dict[str, Setting]:
        """Return the settings that people change most, by heading, those of a file after those of its base."""

        def place(key: str) -> tuple[int, bool]:
            heading = key.partition(".")[0]
            index = HEADINGS.index(heading) if heading in HEADINGS else len(HEADINGS)
            return index, self._based.issuperset(self.settings[key].options)

        return {key: self.settings[key] for key in sorted(self.settings, key=place) if self.settings[key].is_listed}


# A key, whether it is a setting, and the comments above it and behind its value.
Line = tuple[str, bool, str, str]


@cache
def _read(path: Path) -> tuple[str | None, list[Any], list[Line]]:
    """Read a file of conf/: its package, None for that of its group; its defaults list; its keys."""
    text = path.read_text(encoding="utf-8")
    header, lines, loader = re.search(r"^# @package (\S+)", text), text.splitlines(), yaml.CSafeLoader(text)

    def walk(node: Any, start: str) -> Iterator[Line]:
        for name, value in node.value:
            key, line = start + name.value, name.start_mark.line
            if name.value == "hydra":
                continue
            if name.value == "defaults":
                groups = (one for entry in value.value if entry.id == "mapping" for one in walk(entry, ""))
                yield from ((group, False, above, behind) for group, _, above, behind in groups)
                continue
            nested = value.id == "mapping" and len(value.value) > 0
            end = name.end_mark if nested or value.end_mark.line != line else value.end_mark
            first = line
            while first and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            above = " ".join(re.sub("^ *# ?", "", one) for one in lines[first:line])
            yield key, not nested, above, lines[line][end.column :].partition("# ")[2]
            yield from walk(value, f"{key}.") if nested else ()

    tree = loader.get_single_node()
    defaults = (loader.construct_document(tree) or {}).get("defaults", [])
    package = header[1].removeprefix("_global_") if header else None
    return package, defaults, [*walk(tree, "")]


@cache
def declared(script: str) -> Declared:
    """Return the settings that conf/ declares; its files are read once."""
    return Declared(script)


def text_kind(key: str) -> str:
    """Return text or path for a setting of any script whose value is one, "" for others."""
    rules = (one.rule for script in SCRIPTS if (one := declared(script).settings.get(key)))
    return next((rule.kind for rule in rules if rule and rule.is_text), "")


def flat_settings(settings: Mapping[Any, Any], start: str = "", levels: float = math.inf) -> dict[str, Any]:
    """Return nested settings by their keys with dots, down to some level."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and value and levels > 1
        found |= flat_settings(value, f"{start}{key}.", levels - 1) if nested else {f"{start}{key}": value}
    return found


def parents(key: str) -> list[str]:
    """Return the mappings that contain a key, the outermost first."""
    return [key[: match.start()] for match in re.finditer(r"\.", key)]
