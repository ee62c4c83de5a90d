"""Arguments of a command, before Hydra reads them: ordered, quoted, and each mistake answered in one line."""

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from cli.check_keys import TASKS, closest, refuse
from cli.resuming import OF_A_START, newest_run
from cli.terminal import FailedJob, log, started_by_lightning
from foundation.errors import UserError, listing
from foundation.files import read_bytes
from foundation.internals import get_args_parser, raise_hydras_errors
from foundation.settings import CONF, Declared, declared, text_kind
from report.quoting import PROMPTS, QUOTES, has_secret, is_parsed, key_of, literal, override, program, prompt_items
from runs.config_file import MOST_BYTES, calls_another_function, is_own, private_copy
from runs.run_folder import RunFolder

NOTIFY = "RETOUCH_NOTIFY"  # the variable with the addresses
# The word of the command line by which settings of another machine may name functions.
TRUST = "trust="
# A key that settings from outside of conf/ and the command line may have.
VALUE_KEY = re.compile(r"(\+{0,2}|~)[A-Za-z]\w*([./][A-Za-z]\w*)*", re.ASCII)
# The one other setting of conf/ that names a function.
FUNCTION = "objective.loss.path"
# Options of a command with a config of its own, or of a sweep.
NO_OWN_CONFIG = ("-cp", "-cn", "-cd", "--config", "-m", "--multirun")


def read_arguments(arguments: Sequence[str], script: str) -> list[str]:
    """Return the arguments for Hydra: first the settings, then its options; raise a UserError about wrong ones."""
    trust = [one for one in arguments if one.startswith(TRUST)]
    if not {*trust} <= {f"{TRUST}true", f"{TRUST}false"}:
        raise UserError(f"{trust[0]}: must be true or false")
    trusted = trust[-1:] == [f"{TRUST}true"] or started_by_lightning()  # by a command that has checked it
    options, settings = _split([one for one in arguments if one not in trust], script, trusted)
    known = declared(script)
    # Lightning passes on the arguments of the first process, which has quoted them.
    settings = settings if started_by_lightning() else quote_values(settings)
    settings = [_checked(setting, known) for setting in settings]
    if not set(options) - {"-m", "--multirun"}:  # the other options only show something, without imports
        log.info("starting: importing PyTorch takes a few seconds")
    arguments = [*settings, *options]
    return with_run_settings(arguments, trusted) if script == "train" else arguments


def take_addresses(arguments: Sequence[str]) -> list[str]:
    """Move the addresses of notify= to this process's environment, and return the other arguments.

    Addresses are secrets: this comes before anything shows or stores the arguments, as sweeps do.
    """
    addresses = [one for one in arguments if key_of(one) == "notify"]
    if addresses:
        os.environ[NOTIFY] = re.sub(r"^\[(.*)\]$|^null$", r"\1", addresses[-1].partition("=")[2])
    return [one for one in arguments if one not in addresses]


def read_values(settings: Sequence[str], script: str) -> list[str]:
    """Return settings from outside of conf/ and the command line as arguments: values, and names of files in conf/.

    Raises:
        UserError: one names a function, or anything else that only the command line may say.
    """

    def refuse(what: str) -> NoReturn:
        raise UserError(f"{what[:99]!r} is not accepted here. Pass it on the command line.")

    for one in settings:
        key = one.partition("=")[0]
        start = re.split("[./]", key_of(one))[0]
        private = start in ("hydra", TRUST[:-1], *OF_A_START) or has_secret(key)
        elsewhere = start == "logger" and "." in key and not declared(script).knows(key_of(one))  # to a server
        if private or elsewhere or not (VALUE_KEY.fullmatch(key) and one.isprintable()):
            refuse(one)
    arguments = read_arguments([*settings, "--cfg", "job"], script)[:-2]  # as if only shown: without a line in the log
    for given in OverridesParser.create().parse_overrides(arguments):
        key, value = given.key_or_group, given.value()
        if (choices := declared(script).groups.get(key)) is not None and not given.is_delete():
            check_choice(key, value, choices)
        if (place := _function_in(value, key.replace("/", "."))) is not None:
            refuse(place)
    return arguments


def check_choice(group: str, chosen: Any, choices: Sequence[str]) -> None:
    """Raise a UserError if a choice from outside is not the name of a file of conf/, or a list of such names."""
    for one in chosen if isinstance(chosen, list) else [chosen]:
        if one not in (None, *choices):
            raise UserError(f"{group}={one!s:.99}: there is no such choice. Choose {', '.join(choices)}.")


def _function_in(value: Any, key: str) -> str | None:
    """Return the key of a function (_target_), another resolver or a sweep; None if all are plain values."""
    if key == FUNCTION:
        return key
    if isinstance(value, dict):
        found = (
            f"{key}.{name}" if str(name).startswith("_") else _function_in(value[name], f"{key}.{name}")
            for name in value
        )
        return next(filter(None, found), None)
    if isinstance(value, list):
        return next(filter(None, (_function_in(one, key) for one in value)), None)
    if isinstance(value, str):
        return key if calls_another_function(value) else None
    return None if value is None or isinstance(value, bool | int | float) else key


def require_own(config: Path) -> bytes:
    """Return the content of a run's settings; raise a UserError if another machine wrote it, or somebody changed it."""
    with suppress(OSError, ValueError):
        if is_own(content := read_bytes(config, MOST_BYTES)):
            return content
    raise UserError(
        f"{config}: another machine wrote it, or somebody has edited it, and its settings can call any function. "
        f"Look through it, then add {TRUST}true."
    )


def with_run_settings(arguments: list[str], trusted: bool = False) -> list[str]:
    """Return the arguments of train.py; if they only name a run to resume, with the config.yaml of that run.

    Raises:
        UserError: another machine wrote these settings, and they are not `trusted`.
    """
    settings = {key_of(one): one for one in arguments if not one.startswith("-")}
    own = {"hydra", *declared("train").groups, "data.root", "data.shards", "model.pretrained_model_name_or_path"}
    if own & {key.partition("/")[0] for key in settings} or any(one.startswith(NO_OWN_CONFIG) for one in arguments):
        return arguments
    chosen: dict[str, Any] = {}
    with suppress(HydraException):  # reported by Hydra when it composes
        given = OverridesParser.create().parse_overrides([settings[key] for key in OF_A_START if key in settings])
        chosen = {one.key_or_group: one.value() for one in given}
    path, folder = chosen.get("ckpt_path"), chosen.get("output_dir")
    if path is None and (chosen.get("resume") != "auto" or folder is None):
        return arguments
    if path not in (None, "last"):
        run: RunFolder | None = RunFolder.of_checkpoint(Path(str(path)).expanduser())
    else:
        run = newest_run() if folder is None else RunFolder(Path(str(folder)).expanduser())
    if run is None or not run.config.is_file() or not run.checkpoints():
        return arguments
    copy = private_copy(read_bytes(run.config) if trusted else require_own(run.config))
    log.info(f"resuming with the settings of {run.config}")
    place = ["output_dir='${run_folder:${ckpt_path}}'"] if folder is None else []
    return ["-cp", str(copy), "-cn", "config", *place, *arguments]


def quote_values(arguments: list[str]) -> list[str]:
    """Quote prompts and paths, in which commas, brackets, quotes and non-ASCII letters have a meaning for Hydra.

    `prompt=snow, please` becomes `prompt="snow, please"`; in a path ~ becomes the home folder. Quoted paths, lists and
    null are left unchanged, and so are paths with a comma that do not exist: they may be a sweep.
    """
    quoted = []
    for argument in arguments:
        given, _, value = argument.partition("=")
        key = key_of(given)
        if (kind := text_kind(key)) and not is_parsed(key, value):
            value = os.path.expanduser(value) if kind == "path" else value  # a shell expands ~ only at a word's start
            if kind == "path" and value.startswith("~"):  # no user has this name: it may be a file's
                if not os.path.lexists(Path(value).parts[0]):
                    raise UserError(f"{argument}: there is no such user. Write the whole path.")
                value = os.path.abspath(value)
            if kind == "path" and value.startswith("assets/") and not os.path.exists(value):  # an installed example
                value = str(CONF.parent / value)
            if key.startswith("model.") and os.path.exists(value):  # predict.py reads it in other folders
                value = os.path.abspath(value)
            argument = f"{given}={literal(value)}"
        elif key in PROMPTS and (items := prompt_items(value)):
            argument = f"{given}=[{','.join(one if one[0] in QUOTES else literal(one.strip()) for one in items)}]"
        quoted.append(argument)
    return quoted


def _split(arguments: Sequence[str], script: str, trusted: bool) -> tuple[list[str], list[str]]:
    """Return Hydra's options, and the settings, which may stand before, between and after them.

    Raises:
        UserError: a word is neither, or the file of --config-path is another machine's and not `trusted`.
    """
    if "--version" in arguments:  # Hydra's option would print Hydra's
        print(f"retouch {version('retouch')}")
        raise SystemExit(0)
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}. Settings are written KEY=VALUE, without dashes: {program(script)} --help.")

    parser.error = refuse  # type: ignore[method-assign]
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        refuse(f"{unknown[0]}: there is no such option")
    name = f"{(found.config_name or script).removesuffix('.yaml')}.yaml"
    checked: list[str] = []
    if not trusted and found.experimental_rerun is not None:
        what = f"{found.experimental_rerun} is a pickle, which can call any function"
        raise UserError(f"{what}. If you know its origin, then add {TRUST}true.")
    if not trusted and (found.config_path is not None or Path(name).name != name):
        # Hydra composes the copy, and nothing next to the file that was checked: the last option counts.
        copy = private_copy(require_own(CONF.parent / (found.config_path or CONF) / name))
        checked = ["-cp", str(copy), "-cn", "config"]
    settings = list(found.overrides)
    for index, word in enumerate(settings):
        if "=" not in word and not word.startswith("~"):
            key = settings[index - 1].partition("=")[0] if index else ""
            hint = f'Quote the {key}: {key}="...".' if text_kind(key) else f"Write {_meant(word, script)}."
            raise UserError(f"{word}: it is not KEY=VALUE. {hint}")
    return [*(argument for argument in arguments if argument not in settings), *checked], settings


def _meant(word: str, script: str) -> str:
    """Return the setting that a word without a key probably means: a choice of conf/, a file or a folder."""
    path, choices = Path(word).expanduser(), declared(script).groups | {"task": [*TASKS[script]]}
    if key := next((group for group, options in choices.items() if word in options), None):
        return f"{key}={word}"
    is_lora = path.suffix == ".safetensors" or RunFolder(path).config.exists() or any(path.glob("*.safetensors"))
    key = "data.root" if script == "train" else "lora" if is_lora else "image"
    return override(key, word) if path.exists() else "GROUP=NAME or KEY=VALUE"


def _checked(setting: str, known: Declared) -> str:
    """Return a setting as Hydra accepts it; raise a UserError for an unknown key."""
    try:
        given = OverridesParser.create().parse_override(setting)
    except HydraException as error:
        key, _, value = setting.partition("=")
        text = f"If the value is text, quote it twice: {key}='\"{value}\"'."
        hint = f"Keys of a mapping have no quotes: {key}='{{KEY:VALUE}}'." if value.startswith("{") else text
        raise UserError(f"{setting}: {_first_line(error)}. {hint}") from error
    key = given.key_or_group
    if key.startswith("hydra") or "@" in setting.partition("=")[0]:
        return setting
    if key in known.groups:
        if given.value() is not None or given.is_delete():
            return setting
        if key in known.may_be_null:
            return f"~{key}"
        raise UserError(f"{setting}: a choice is needed. Choose {', '.join(known.groups[key])}.")
    dotted = key.replace("/", ".")
    first = known.firsts.get(dotted) or (dotted if dotted in known.firsts.values() else None)
    if first and not given.is_delete():
        group = given.value()
        is_group = isinstance(group, dict) and all(known.knows(f"{dotted}.{one}") for one in group)
        if first == dotted or not is_group:
            # A mapping would be merged with the present one.
            before, _, after = setting.partition("=")
            return f"{before.replace(key, first)}={f'[{after}]' if isinstance(group, dict) else after}"
    is_argument = known.takes_arguments(dotted) and (given.is_add() or given.is_force_add())
    if not known.knows(dotted) and not is_argument:
        refuse(known, key)
    return setting


@contextmanager
def hydras_errors(script: str) -> Iterator[None]:
    """Temporarily turn Hydra's errors about settings into one line of ours, and exit status 1."""
    raise_hydras_errors()  # its own advice is to write +KEY=VALUE
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RuntimeError) as error:  # submitit's
        if isinstance(error, FailedJob):
            raise SystemExit(1) from None
        if type(error) is CompactHydraException:  # a `FailedJob` of another machine
            raise UserError(str(error)) from None
        in_job = any(frame.f_code.co_name == "run_job" for frame, _ in traceback.walk_tb(error.__traceback__))
        if in_job or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise UserError(explained(error, declared(script))) from error


def explained(error: Exception, known: Declared) -> str:
    """Return one line about an error of Hydra, of OmegaConf or of a YAML file."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = [one for one in error.options if not one.startswith("_")]
        near = closest(name, options, len(name) / 3)
        hint = f"Did you mean {near}?" if near else f"Choose {', '.join(options)}."
        return f"{group}={name}: there is no such choice. {hint}"
    if match := re.match(r"Could not override '(.+)'|Could not delete from config. '(.+)' does", str(error)):
        key = match[1] or match[2]
        if setting := known.settings.get(key):
            return f"{key}: the chosen options lack this setting. Choose {listing(setting.options)}."
        refuse(known, key)
    if match := re.match(r"Ambiguous value for argument '(.+)'", str(error)):
        return (
            f"{match[1]}: several values are a sweep, which needs -m; a list is [A,B]; text with a comma needs quotes."
        )
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: this is not YAML ({error.problem})."
    known_well = isinstance(error.__cause__, UserError)
    line = ": ".join(_first_line(one) for one in (error, error.__cause__)[known_well:] if one is not None)
    in_words = "a mapping cannot replace the list that is there. Give a list, as [{KEY:VALUE}]."
    return line.replace("Cannot merge DictConfig with ListConfig", in_words)


def _first_line(error: BaseException) -> str:
    text = re.sub(r": \w+ raised while composing config:\n", ": ", str(error))  # the reason is on the next line
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
