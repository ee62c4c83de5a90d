"""The house stands as docs/architecture.md says: arrows go down, no circles, no file over 400 lines."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import lightning.pytorch as L
import pytest
from hydra.utils import instantiate

from lightning_modules.edit_module import EditModule
from tests.support.commands import ROOT, compose

# Each may import from those behind it. What stands in lightning_modules/ and datamodules/ is a room of its own there.
FLOORS = ["train", "predict", "tasks", "callbacks", "report", "runs", "lightning_modules", "datamodules"]
LINES = 400
PUBLIC_NAMES = 50
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for name in FLOORS
    for path in ([ROOT / f"{name}.py"] if (ROOT / f"{name}.py").is_file() else (ROOT / name).rglob("*.py"))
}


def imports(path: Path) -> set[str]:
    """The files of the house that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(module if module in FILES else node.module for module in modules)
    return found & FILES.keys()


def room(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] in FLOORS[-2:] else parts[0]


ARROWS = {name: imports(path) - {name} for name, path in FILES.items()}


def test_no_circle_of_files_and_none_of_rooms():
    TopologicalSorter(ARROWS).prepare()
    rooms: dict[str, set[str]] = {}
    for name, found in ARROWS.items():
        rooms.setdefault(room(name), set()).update(room(other) for other in found if room(other) != room(name))
    TopologicalSorter(rooms).prepare()


def test_arrows_between_folders_go_down():
    up = [
        f"{name} -> {other}"
        for name, found in ARROWS.items()
        for other in found
        if FLOORS.index(other.partition(".")[0]) < FLOORS.index(name.partition(".")[0])
    ]
    assert not up


def test_image_sets_are_a_closed_package():
    found = {other for name, others in ARROWS.items() if room(name) == "datamodules.images" for other in others}
    assert {name for name in found if room(name) != "datamodules.images"} == {"datamodules.errors", "datamodules.files"}


def test_only_train_and_predict_are_imported_by_none():
    """What nothing imports is named in a YAML, or is dead."""
    settings = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "conf").rglob("*.yaml"))
    code = "".join(path.read_text(encoding="utf-8") for path in FILES.values())
    imported = set().union(*ARROWS.values())
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    unknown = FILES.keys() - imported - packages - {"train", "predict"}
    assert not [name for name in unknown if f"{name}." not in settings + code]


def test_streams_have_one_place():
    """And another where data is, which may not import it."""
    words = ("cuda.Stream", "current_stream", "record_event", "wait_event", "wait_stream", "record_stream")
    users = {name for name, path in FILES.items() if any(word in path.read_text(encoding="utf-8") for word in words)}
    assert users == {"lightning_modules.execution.side_stream", "datamodules.prefetch"}


@pytest.mark.parametrize("folder", [*FLOORS, "benchmarks", "assets"])
def test_no_file_is_longer_than_a_sitting(folder):
    files = [ROOT / f"{folder}.py"] if (ROOT / f"{folder}.py").is_file() else (ROOT / folder).rglob("*.py")
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert lengths
    assert not {path.name: length for path, length in lengths.items() if length > LINES}


def test_edit_module_has_few_public_names():
    """Its own, those of its family and of what it overrides of Lightning's."""
    module = instantiate(compose("train").model, _convert_="all")
    of_lightning = set(dir(L.LightningModule()))
    bases = type(module).__mro__[: type(module).__mro__.index(L.LightningModule)]
    overridden = {name for base in bases for name in vars(base)} & of_lightning
    names = {name for name in {*dir(module), *vars(module)} - of_lightning | overridden if not name.startswith("_")}
    assert {"base", "training_step", "velocity"} < names
    assert len(names) <= PUBLIC_NAMES, sorted(names)
    assert issubclass(type(module), EditModule)
