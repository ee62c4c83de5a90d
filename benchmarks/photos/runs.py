"""Train on small photographs in resumable sweeps, and read their output; shared by the sections of quality.py."""

import ast
import copy
import functools
import hashlib
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cli.resolvers import CONF  # registers the resolvers of conf/
from lightning_modules.pretrained.repository import resolve_repository
from report.images import PARTS
from report.tables import read_validation

ROOT = Path(__file__).parent.parent.parent
# Data, caches and runs; they are kept, so that a sweep which was stopped resumes.
WORK = ROOT / "outputs" / "quality"
SEEDS = (1, 2, 3)
SUNSET = ROOT / "assets" / "sunset"
COMMON = (
    "data=cached",
    "data.root=WORK/sunset/train.jsonl",
    "data.val_root=WORK/sunset/held_out.jsonl",
    "data.resolution=64",
    "data.cache_dir=WORK/cache",
    "data.num_workers=0",
    "optimizer.lr=5e-3",
    "scheduler=cosine",
    "trainer.max_steps=100",
    "sample_every=0",
    "save_every=0",
    "logger=none",
    "callbacks.sample_images.count=8",
    "callbacks.report=null",
    "callbacks.model_card=null",
)
# The figures of a run by the headers of their columns.
Figures = dict[str, float]


@dataclass(frozen=True)
class Section:
    """A table of docs/quality.md or of the study, and perhaps its image.

    Attributes:
        name: name of the markers in the page, and of the records.
        rows: overrides of train.py, and words without = that only `measure` knows, by the label of the row.
        measure: returns the figures of each seed from a row's overrides.
        columns: decimals by header.
        corner: header of the labels.
        write: writes the data into WORK; called before the first row.
        image: returns the image docs/NAME.webp without its names, once all rows are measured.
        headers, labels: names of the image's columns and rows.
    """

    name: str
    rows: Mapping[str, Sequence[str]]
    measure: Callable[[Sequence[str]], list[Figures]]
    columns: Mapping[str, int]
    corner: str = ""
    write: Callable[[], None] | None = None
    image: Callable[[], Image.Image] | None = None
    headers: Sequence[str] = ()
    labels: Sequence[str] = ()

    def hash(self, label: str) -> str:
        """Return the hash of all that determines a row: settings, base, photographs, code that writes and measures."""
        row = self.rows[label]
        chosen = settings([one for one in row if "=" in one])
        return digest(chosen, row, list(self.columns), code_of(self.measure), code_of(self.write))


def train(*overrides: str, seeds: Sequence[int] = SEEDS) -> list[Path]:
    """Return the folder of a finished run for each seed: one sweep of train.py, resumed if it was stopped."""
    chosen = settings(overrides)
    folder = WORK / "runs" / digest(chosen, sorted(overrides), content(json.dumps(chosen)))
    with _lock(folder):
        done = folder / "done.json"
        finished = json.loads(done.read_text()) if done.is_file() else []
        if not set(seeds) <= set(finished):
            sweep = [f"seed={','.join(map(str, seeds))}", f"output_dir={folder}", "hydra.sweep.subdir=${seed}"]
            command("train.py", "-m", *COMMON, *overrides, *sweep, "resume=auto")
            done.write_text(json.dumps(sorted({*finished, *seeds})))
    return [folder / str(seed) for seed in seeds]


def command(*parts: str) -> None:
    """Run a command of the repository on one core; WORK in its settings stands for the folder of the data."""
    line = [sys.executable, *(part.replace("WORK", str(WORK)) for part in parts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


_LOCKS: dict[Path, threading.Lock] = {}
# Neither Hydra's composing nor transformers' loading may happen in two threads at once.
_COMPOSING, LOADING = threading.Lock(), threading.Lock()


def _lock(folder: Path) -> threading.Lock:
    """Return the lock of a folder: two rows may need one run."""
    return _LOCKS.setdefault(folder, threading.Lock())


# Hashes


def settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed settings on which the result of train.py depends, without those that are off.

    A new setting that is off by default leaves the hash as it is.
    """
    with _COMPOSING:
        return _settings(tuple(overrides))


@functools.cache
def _settings(overrides: tuple[str, ...]) -> dict[str, Any]:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", [*COMMON, *overrides, "output_dir=x"], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg.hydra
    chosen: dict[str, Any] = {
        name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("model", "data", "trainer")
    }
    del chosen["model"]["recipe"]  # what a run takes of it is in its other settings
    return _without_off(chosen)


def _without_off(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_off(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if not (one is None or one is False or one in ({}, []))}
    return value


def digest(chosen: Mapping[str, Any], *parts: Any) -> str:
    """Return a short hash of composed settings, of their base's weights, of the photographs, and of other values."""
    base = ROOT / resolve_repository(chosen["model"]["pretrained_model_name_or_path"])
    found = hashlib.sha256(json.dumps([chosen, *parts], sort_keys=True, default=str).encode())
    for path in (base / "transformer" / "diffusion_pytorch_model.safetensors", *sorted(SUNSET.rglob("*.jpg"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


FOLLOWED = ("benchmarks.", "photos_")


def code_of(function: Callable[..., Any] | None) -> dict[str, str]:
    """Return the syntax, without comments and docstrings, of a function and of all that it uses, by name.

    Names are followed within benchmarks/, except this module, and the scripts of assets/.
    """
    found: dict[str, str] = {}
    if function is not None:
        _collect(function.__module__, function.__qualname__, found)
    return found


def _collect(module: str, name: str, found: dict[str, str]) -> None:
    if module == __name__ or not module.startswith(FOLLOWED) or f"{module}.{name}" in found:
        return
    for node in _statements(inspect.getsource(sys.modules[module])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    _collect(str(node.module), alias.name, found)
        elif name in _defined(node):
            found[f"{module}.{name}"] = ast.dump(_without_docstrings(node))
            for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)}):
                _collect(module, used, found)


@functools.cache
def _statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _without_docstrings(tree: ast.AST) -> ast.AST:
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def content(text: str) -> str:
    """Return the hash of the data files below the folders of WORK that a text names."""
    found = hashlib.sha256()
    for name in sorted({*re.findall(r"WORK/([\w-]+)", text)} - {"cache"}):
        for path in sorted((WORK / name).rglob("*.*")):
            found.update(path.read_bytes())
    return found.hexdigest()


# Results


def last_row(run: Path) -> Figures:
    """Return the last row of a run's validation.csv."""
    return read_validation(run / "validation.csv")[-1]


class Made(NamedTuple):
    """The parts of a sample image, each (H, W, 3) in [0, 255]."""

    control: np.ndarray
    result: np.ndarray
    target: np.ndarray


def samples(run: Path, step: int) -> dict[str, Made]:
    """Read the sample images of a step of a run, by name."""
    return {path.stem: Made(*parts(path)) for path in sorted((run / "samples" / f"step-{step:06d}").glob("*.png"))}


def parts(path: Path) -> list[np.ndarray]:
    """Return the images of a strip: its controls, the result, and the target."""
    with Image.open(path) as strip:
        widths = [int(width) for width in str(strip.info[PARTS]).split()]
        return np.split(np.asarray(strip.convert("RGB"), dtype=np.float32), np.cumsum(widths)[:-1], axis=1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the root mean square difference of two images in levels of 255."""
    return float(np.sqrt(np.square(one - other).mean()))


def grid(rows: Sequence[Sequence[np.ndarray]], enlarged: int = 2) -> Image.Image:
    """Return rows of images as one image, with a pixel of grey between them."""
    padded = [[np.pad(one, ((0, 1), (0, 1), (0, 0)), constant_values=128) for one in row] for row in rows]
    image = Image.fromarray(np.concatenate([np.concatenate(row, axis=1) for row in padded]).round().astype("uint8"))
    return image.resize((image.width * enlarged, image.height * enlarged), Image.Resampling.NEAREST)


def table(section: Section, figures: Mapping[str, Sequence[Figures]]) -> str:
    """Return the means and standard deviations over the seeds as a table, row by row."""
    lines = [f"| {section.corner} | {' | '.join(section.columns)} |", f"|{'---|' * (len(section.columns) + 1)}"]
    for label, seeds in figures.items():
        cells = [
            cell([one[header] for one in seeds], decimals) if header in seeds[0] else ""
            for header, decimals in section.columns.items()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[float], decimals: int) -> str:
    """Return a mean, with the standard deviation of several values."""
    spread = f" ± {statistics.stdev(values):,.{decimals}f}" if len(set(values)) > 1 else ""
    return f"{statistics.fmean(values):,.{decimals}f}{spread}"
