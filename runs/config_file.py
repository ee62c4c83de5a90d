"""A run's config.yaml: signed by the machine that writes it, and read as a stranger may have written it."""

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf

from foundation.errors import UserError
from foundation.files import read_bytes, reading, replacing
from foundation.internals import YAML_RESOLVERS

# Bounds of a file, whose aliases of aliases would take hours: bytes, levels of mappings and lists, letters of an
# interpolation, and what may be a number.
MOST_BYTES, MOST_LEVELS, MOST_LETTERS = 2**20, 50, 1000
LONG_NUMBER = re.compile(r"[-+.:_\da-fA-FxoO]{100,}")
# The start of the last line, which ends in the signature.
SIGNED = b"# written by this machine: "
KEY_LETTERS = 64
# The functions of interpolations that a stranger's settings may use: those of `cli.resolvers`, and OmegaConf's that
# reads another setting. Its others read the environment, or make settings of a text.
OUR_RESOLVERS = (
    "work_folder",
    "asset",
    "when",
    "warmup_steps",
    "program",
    "listed_settings",
    "run_folder",
    "prediction_folder",
)
RESOLVERS = ("oc.select", *OUR_RESOLVERS)
KNOWN = re.compile(rf"\$\{{\s*(?:(?:{'|'.join(map(re.escape, RESOLVERS))})\s*:|[\w.-]+\s*\}})")
_copies: list[TemporaryDirectory[str]] = []


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with OmegaConf's numbers and texts, 20 times as fast, which matters for 200 runs."""

    yaml_implicit_resolvers = YAML_RESOLVERS


class _Foreign(_Loader):
    """YAML in which a text keeps an interpolation by another function, a long one, and several, as they are.

    Their number could double from setting to setting.
    """

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        unsafe = text.count("${") > 1 or calls_another_function(text) or len(text) > MOST_LETTERS
        return text.replace("${", "$ {") if unsafe else text


def write_config(path: Path, settings: dict[str, Any]) -> None:
    """Write settings to a file and sign it, if this user's home can keep a key."""
    text = OmegaConf.to_yaml(OmegaConf.create(settings)).encode()
    with replacing(path) as temporary:
        temporary.write_bytes(text + SIGNED + _signature(text) + b"\n")


def is_own(content: bytes) -> bool:
    """Return whether this user has written these bytes by `write_config` on this machine, and nobody has changed them.

    Whoever asks uses these bytes: the file may change meanwhile.
    """
    text, _, signature = content.rpartition(SIGNED)
    return len(signature) > 1 and hmac.compare_digest(signature[:-1], _signature(text))


def private_copy(content: bytes) -> Path:
    """Return a folder that only this user can change, with these bytes as config.yaml; it ends with this process."""
    _copies.append(folder := TemporaryDirectory(prefix="settings-", dir=_state(), ignore_cleanup_errors=True))
    Path(folder.name, "config.yaml").write_bytes(content)
    return Path(folder.name)


def read_config(path: Path, remedy: str = "repair or remove it", resolves: bool = False) -> dict[str, Any]:
    """Return the settings in a file: plain values, lists and mappings; nothing is interpolated.

    Args:
        resolves: keep interpolations of another machine's file by other functions than `RESOLVERS` from being resolved.

    Raises:
        UserError: it is damaged, larger or deeper than settings are, is not a regular file, or has aliases or tags.
    """
    with reading(path, remedy):
        text, level = read_bytes(path, MOST_BYTES), 0
        loader = _Foreign if resolves and not is_own(text) else _Loader
        for event in yaml.parse(text, loader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            long = LONG_NUMBER.fullmatch(getattr(event, "value", ""))
            if level > MOST_LEVELS or isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or long:
                raise ValueError("an alias, a tag, a number of many digits, or too many levels")
        return dict(yaml.load(text, loader))


def resolvable(path: Path, remedy: str = "repair or remove it") -> dict[str, Any]:
    """Return the settings in a file for OmegaConf, which may resolve their interpolations."""
    return read_config(path, remedy, resolves=True)


def calls_another_function(text: str) -> bool:
    """Return whether a text has an interpolation other than ${KEY} and those of `RESOLVERS`, or one with a mapping."""
    unknown = (not KNOWN.match(text, found.start()) for found in re.finditer(r"\$\{", text))
    return "${" in text and ("{" in text.replace("${", "") or any(unknown))


def _state() -> Path | None:
    """Return this user's folder of keys and copies; None if the home folder can keep none."""
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "retouch")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    return None


def _signature(text: bytes) -> bytes:
    """Return a signature by this user's key, which is created at its first use; "" if the home folder keeps none."""
    with suppress(OSError, UserError):
        path = (_state() or Path(os.devnull)) / "key"
        if not path.is_file() or path.stat().st_size != KEY_LETTERS:
            with replacing(path, private=True) as temporary:
                temporary.write_text(secrets.token_hex(), encoding="utf-8")
        return hmac.new(path.read_bytes(), text, hashlib.sha256).hexdigest().encode()
    return b""
