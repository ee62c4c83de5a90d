"""The catalogue of models: what the YAMLs in conf/model say about each, read once."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from foundation.settings import CONF

CONFIGURATIONS = CONF.parent / "assets" / "configurations"


class CatalogueModel(NamedTuple):
    """A model of conf/model.

    Attributes:
        name: name of its YAML.
        base: folder or hub id of its base; of a variant, such as another precision, that of its parent.
        has_own_base: False for a variant.
        target: class of its family.
        licence: licence of the weights, in Markdown; "" if the YAML does not say.
        distilled: what the base was distilled from, or "no".
        architecture: identifier in the headers of LoRA files.
        learns: what a sample consists of; "" for a variant.
        training: GPU memory in GB, with that of CUDA, in bf16, fp8 and 4 bits; empty if the YAML does not say.
        encoding: the same of the encoders.
        download: GB of all weights in bf16.
        loads: programs that load its LoRA.
    """

    name: str
    base: str
    has_own_base: bool
    target: str
    licence: str
    distilled: str
    architecture: str
    learns: str = ""
    training: tuple[int, ...] = ()
    encoding: int = 0
    download: int = 0
    loads: str = ""

    @property
    def plain_licence(self) -> str:
        """Its licence without Markdown: NAME (URL)."""
        return re.sub(r"\[(.+?)\]\((.+?)\)(, gated)?", r"\1 (\2)", self.licence)


@cache
def catalogue() -> dict[str, CatalogueModel]:
    """Return the models of conf/model by name. A YAML inherits what it does not say from the one that it builds on."""
    return {path.stem: _read(path.stem) for path in sorted((CONF / "model").glob("[!_]*.yaml"))}


@cache
def _read(name: str) -> CatalogueModel:
    text = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    settings: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    facts = dict(re.findall(r"^# ([A-Z][a-z ]+): (.+)$", text, re.MULTILINE))
    parents = [one for one in settings["defaults"] if isinstance(one, str) and not one.startswith("_")]
    parent = _read(parents[0]) if parents else CatalogueModel(name, "", False, "", "", "no", name)
    base, licence = settings.get("pretrained_model_name_or_path"), facts.get("Licence", parent.licence)
    *training, encoding = map(int, re.findall(r"\d+", facts.get("Memory", "0")))
    return CatalogueModel(
        name,
        base or parent.base,
        base is not None,
        settings.get("_target_", parent.target),
        licence,
        facts.get("Distilled", parent.distilled),
        facts.get("Architecture", parent.architecture),
        facts.get("Learns from", ""),
        tuple(training),
        encoding,
        int(facts.get("Download", 0)),
        facts.get("Loads in", ""),
    )


def shipped_models() -> Iterator[tuple[CatalogueModel, Path]]:
    """Yield the models that have a base of their own, with its `shipped_configuration`."""
    for model in catalogue().values():
        if model.has_own_base and (folder := shipped_configuration(model.base)):
            yield model, folder


def shipped_configuration(name: str) -> Path | None:
    """Return the folder in assets/ with a known model's files without weights; None for a folder or another hub id."""
    folder = CONFIGURATIONS / name.replace("/", "--")
    return folder if folder.is_dir() and not Path(name).is_dir() else None
