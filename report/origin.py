"""Origin of a base model as others know it: its id on the hub, and its licence."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from foundation.catalogue import catalogue
from foundation.hub import repository_file
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import EMBEDDED
from report.quoting import code
from runs.run_folder import best_effort

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# A folder of the hub's cache.
SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", re.ASCII)


class Origin(NamedTuple):
    """Origin of a base.

    Attributes:
        repositories: known ids on the hub, of the base and of another transformer.
        base: its name in a sentence, if it is not on the hub.
        licence: result of `licence`, if it is the same for all parts.
    """

    repositories: list[str]
    base: str
    licence: dict[str, str]

    @classmethod
    def of(cls, base: FrozenBase, model_name: str) -> "Origin":
        """Read the origin from the settings and the README.md of a base."""
        known = {name: hub_id(name, model_name) for name in (base.name, base.transformer_name)}
        licences = [licence(name, id, base.revision if name == base.name else None) for name, id in known.items()]
        same = licences[0] if all(one == licences[0] for one in licences) else {}
        if not any(licences) and {*known} == {base.name} and model_name in catalogue():
            same = _catalogued(known[base.name] or base.name, model_name)
        of_retouch = "Photos, the small model that comes with Retouch"
        sentence = of_retouch if base.name == EMBEDDED else code(Path(public_name(base.name, model_name)).name)
        return cls([id for id in known.values() if id], sentence, same)


def _catalogued(name: str, model_name: str) -> dict[str, str]:
    """Return the licence that conf/model gives for its own base, as `licence` does."""
    model = catalogue()[model_name]
    if name != model.base or not model.licence:
        return {}
    if linked := re.match(r"\[(.+?)\]\((.+?)\)", model.licence):
        return {"license": "other", "license_name": linked[1], "license_link": linked[2]}
    return {"license": model.licence.lower().replace(" ", "-")}


def public_name(name: str, model_name: str) -> str:
    """Return the name of a base or a transformer in published commands: its hub id, or PATH_TO/NAME to fill in.

    Args:
        model_name: as for `hub_id`.
    """
    place = name if name == EMBEDDED else f"PATH_TO/{Path(os.path.expanduser(name)).absolute().name}"
    return hub_id(name, model_name) or place


def hub_id(name: str, model_name: str) -> str | None:
    """Return the repository on the hub that a setting names, None for a folder of unknown origin.

    Args:
        name: a folder or a hub id.
        model_name: name of the model's YAML; a folder with the name of its default is a copy of that.
    """
    path = Path(os.path.expanduser(name))
    if not path.is_dir():
        return name if HUB_ID.fullmatch(name) and not path.exists() else None
    if cached := SNAPSHOT.search(path.resolve().as_posix()):
        return f"{cached[1]}/{cached[2]}"
    default = catalogue()[model_name].base if model_name in catalogue() else ""
    return default if "/" in default and default.rpartition("/")[2] == path.name else None


def published(value: Any, model_name: str) -> Any:
    """Return a value for a published file: folders and files of this machine become their names only.

    Args:
        model_name: as for `hub_id`.
    """
    if isinstance(value, dict):
        return {key: published(one, model_name) for key, one in value.items()}
    if isinstance(value, list):
        return [published(one, model_name) for one in value]
    if not isinstance(value, str) or not (value.startswith(("/", "~")) or os.path.exists(value)):
        return value
    return hub_id(value, model_name) or Path(os.path.expanduser(value)).absolute().name


def licence(name: str, repository: str | None, revision: str | None) -> dict[str, str]:
    """Return license, license_name and license_link from the base's README.md; nothing without these.

    Args:
        name: a folder or a hub id.
        repository: its `hub_id`, for a link to one of its files.
    """
    if name == EMBEDDED or Path(os.path.expanduser(name)).is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    facts: Any = None
    # An unreachable base, or a README.md with damaged YAML, is a note.
    with best_effort("licence of the base"):
        path = repository_file(str(Path(os.path.expanduser(name))), "README.md", revision)
        facts = None if path is None else metadata_load(path)
    names = ("license", "license_name", "license_link")
    found = {key: " ".join(facts[key].split()) for key in names if isinstance(facts.get(key), str)} if facts else {}
    if "license" not in found:
        return {}
    link = found.pop("license_link", "")
    if re.fullmatch(r"[\w./-]+", link) and repository is not None:  # a file next to it
        link = f"https://huggingface.co/{repository}/blob/main/{link.removeprefix('./')}"
    return {**found, "license_link": link} if re.fullmatch(r"https?://[^\s()<>\"]+", link) else found
