"""The structure of docs/architecture.md: imports go downward, no cycles, files of 60 to 400 lines, names once."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.commands import ROOT

# Each imports only from itself and those after it.
FLOORS = [
    "train",
    "predict",
    "studio",
    "extras",
    "tasks",
    "cli",
    "callbacks",
    "report",
    "runs",
    "lightning_modules",
    "datamodules",
    "foundation",
]
# Their packages and files count as packages of their own.
LARGE = ("lightning_modules", "datamodules")
LINES = 400
SPLINTER = 60
# These may only fall.
SPLINTERS = 0
NAMES_DEFINED_TWICE = 1
CONSTANTS_DEFINED_TWICE = 0
OWN_MODULES_BY_NAME = 0
WRONG_OPENERS = 0
DIALECT = ("is none of", "does not go with")
OPENERS = re.compile(r"(What|Of|As|Those|The same|By|In|Inside|Which|Where|How|All|It|One)\b")
ARGUMENT_OF = re.compile(r"^\s+\w+(?: \([^)]*\))?: of ", re.MULTILINE)


def python_files(folder: str) -> list[Path]:
    """Return the file of a module, or the files of a package."""
    module = ROOT / f"{folder}.py"
    return [module] if module.is_file() else sorted((ROOT / folder).rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for name in FLOORS
    for path in python_files(name)
}


def imports(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(module if module in FILES else node.module for module in modules)
    return found & FILES.keys()


def package(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] in LARGE else parts[0]


IMPORTS = {name: imports(path) - {name} for name, path in FILES.items()}


def test_no_import_cycle_of_files_or_packages():
    TopologicalSorter(IMPORTS).prepare()
    packages: dict[str, set[str]] = {}
    for name, found in IMPORTS.items():
        packages.setdefault(package(name), set()).update(
            package(other) for other in found if package(other) != package(name)
        )
    TopologicalSorter(packages).prepare()


def test_imports_between_folders_go_downward():
    up = [
        f"{name} -> {other}"
        for name, found in IMPORTS.items()
        for other in found
        if FLOORS.index(other.partition(".")[0]) < FLOORS.index(name.partition(".")[0])
    ]
    assert not up


def test_image_sets_and_lora_files_are_closed_packages():
    """Importing them loads no large library besides PyTorch."""
    ours: list[str] = []
    for closed in ("datamodules.images", "lightning_modules.lora_files"):
        files = [name for name in FILES if package(name) == closed]
        others = {other for name in files for other in IMPORTS[name] if other not in files}
        assert {name for name in others if not name.startswith("foundation.")} == set()
        ours += files
    code = f"import sys, {', '.join(ours)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"lightning", "hydra", "diffusers", "peft"} & set(loaded.split())


def test_only_the_commands_are_imported_by_none():
    """Other modules that nothing imports are named in a YAML, or are dead."""
    settings = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "conf").rglob("*.yaml"))
    code = "".join(path.read_text(encoding="utf-8") for path in FILES.values())
    imported = set().union(*IMPORTS.values())
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    unknown = FILES.keys() - imported - packages - {"train", "predict", "studio"}
    assert not [name for name in unknown if f"{name}." not in settings + code]


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def test_no_file_is_longer_than_400_lines():
    files = [path for folder in (*FLOORS, "benchmarks", "assets") for path in python_files(folder)]
    assert not {path.name: lines(path) for path in files if lines(path) > LINES}


def test_files_are_whole_ideas():
    """A short file that only one other imports is a part of that one, unless a family's."""
    importers = Counter(other for found in IMPORTS.values() for other in found)
    splinters = [
        name
        for name, path in FILES.items()
        if importers[name] == 1 and lines(path) < SPLINTER and ".families." not in name and path.name != "__init__.py"
    ]
    assert len(splinters) <= SPLINTERS, splinters


def test_public_names_are_defined_once():
    places: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert len(twice) <= NAMES_DEFINED_TWICE, twice


def test_constants_are_defined_once():
    """Type variables as well. Each file has its own `log`, and each family its own names of layers."""
    places: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        for node in tree.body if ".families." not in name else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and not target.id.startswith("_") and target.id != "log":
                    places.setdefault(target.id, set()).add(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert len(twice) <= CONSTANTS_DEFINED_TWICE, twice


def test_own_modules_are_imported_by_statements():
    """Modules of other libraries may be found by a name; the repository's table of classes has such."""
    calls = re.compile(r"(?:import_module|__import__)\((.*?)\)")
    found = [(name, module) for name, path in FILES.items() for module in calls.findall(path.read_text("utf-8"))]
    ours = [(name, module) for name, module in found if module not in ("library", '"diffusers"')]
    assert len(ours) <= OWN_MODULES_BY_NAME, ours


def texts(*folders: str) -> dict[Path, str]:
    """Return the source of all files, without this one, which names what it forbids."""
    paths = [path for folder in folders for path in python_files(folder)]
    return {path: path.read_text(encoding="utf-8") for path in paths if path != Path(__file__)}


def test_docstrings_open_with_a_verb_or_a_noun():
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    trees = [ast.parse(text) for text in texts(*FLOORS, "benchmarks", "tests").values()]
    docstrings = [ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    wrong = [text.splitlines()[0] for text in docstrings if text and OPENERS.match(text)]
    assert len(wrong) <= WRONG_OPENERS, wrong


def test_production_code_speaks_no_dialect():
    code = "\n".join(texts(*FLOORS).values())
    assert not [phrase for phrase in DIALECT if phrase in code]
    assert not ARGUMENT_OF.findall(code)


def test_tests_and_benchmarks_speak_no_dialect():
    code = texts("tests", "benchmarks")
    assert not [path.name for path, text in code.items() if ARGUMENT_OF.search(text)]
