"""A run's config.yaml: signed by the machine that writes it, and read as a stranger may have written it."""

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from datamodules.files import read_bytes, reading, replacing

# Bounds of a file, whose aliases of aliases would take hours: its bytes, and levels of mappings and lists.
MOST_BYTES, MOST_LEVELS = 2**20, 50
# The start of the last line, which ends in the signature.
SIGNED = b"# written by this machine: "
KEY_BYTES = 32
# The functions of interpolations that a stranger's settings may use: those of `tasks.resolvers`, and OmegaConf's that
# reads another setting. Its others read the environment, or make settings of a text.
RESOLVERS = ("oc.select", "work_folder", "when", "warmup_steps", "program", "run_folder", "prediction_folder")
KNOWN = re.compile(rf"\$\{{\s*(?:(?:{'|'.join(map(re.escape, RESOLVERS))})\s*:|[\w.-]+\s*\}})")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with OmegaConf's numbers and texts, 20 times as fast, which matters for 200 runs."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


def write_config(path: Path, settings: dict[str, Any]) -> None:
    """Write settings to a file and sign it, if this user's home can keep a key."""
    text = OmegaConf.to_yaml(OmegaConf.create(settings)).encode()
    with replacing(path) as temporary:
        temporary.write_bytes(text if (key := _key()) is None else text + SIGNED + _signature(key, text) + b"\n")


def is_own(path: Path) -> bool:
    """Return whether this user has written a file by `write_config` on this machine, and nobody has changed it."""
    with suppress(OSError, ValueError):
        text, signed, signature = read_bytes(path, MOST_BYTES).rpartition(SIGNED)
        return (
            bool(signed) and (key := _key()) is not None and hmac.compare_digest(signature[:-1], _signature(key, text))
        )
    return False


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a file: plain values, lists and mappings with texts as keys; nothing is interpolated.

    Raises:
        UserError: it is damaged, larger or deeper than settings are, contains aliases, or is not a regular file.
    """
    with reading(path, "repair or remove it"):
        text, level = read_bytes(path, MOST_BYTES), 0
        for event in yaml.parse(text, _Loader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS or isinstance(event, yaml.AliasEvent):
                raise ValueError("an alias" if level <= MOST_LEVELS else f"more than {MOST_LEVELS} levels")
        settings = yaml.load(text, _Loader)
        if not isinstance(settings, dict):
            raise ValueError("no settings")
        return _plain(settings)


def interpolated(path: Path) -> DictConfig:
    """Return the settings in a file, whose values may be looked up; errors as in `read_config`.

    In a file that another machine wrote a text with another function, or more than one interpolation (whose number
    could double from setting to setting), stays as it is.
    """

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(one) for key, one in value.items()}
        if isinstance(value, list):
            return list(map(kept, value))
        unsafe = isinstance(value, str) and (value.count("${") > 1 or calls_another_function(value))
        return value.replace("${", "$ {") if unsafe else value

    settings = read_config(path)
    return OmegaConf.create(settings if is_own(path) else kept(settings))


def calls_another_function(text: str) -> bool:
    """Return whether a text has an interpolation other than ${KEY} and those of `RESOLVERS`."""
    return any(not KNOWN.match(text, found.start()) for found in re.finditer(r"\$\{", text))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{value!r:.50} is not a setting")
    return value


def _signature(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


def _key() -> bytes | None:
    """Return the key of this user, created at its first use; None if the home folder cannot keep one."""
    with suppress(OSError, RuntimeError):
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "retouch", "key")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        return key if len(key := path.read_bytes()) == KEY_BYTES else None
    return None
