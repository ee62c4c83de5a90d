"""The libraries that commands load, counted by modules: seconds depend on the machine."""

import re
import tomllib
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from tests.support.commands import ROOT, run_code

# Used by some settings and tasks only.
UNUSED = {
    "torch._inductor.compile_fx",  # by model.compile
    "networkx",  # by Inductor
    "torch.utils.benchmark",  # imports setuptools
    "setuptools",
    "optimum",  # by eight bits
    "datasets",
    "pandas",
    "imagehash",
    "timm",
    "tensorboard",  # by logger=tensorboard
    "starlette",
    "uvicorn",
}


def loaded(code):
    """Return the modules that code loads in a process of its own, and the objects that it froze."""
    done = run_code(f"{code}\nimport gc, sys; assert gc.isenabled(); print(gc.get_freeze_count(), *sys.modules)")
    count, *modules = done.stdout.splitlines()[-1].split()
    return set(modules), int(count)


def test_training_and_its_plan_load_no_library_that_they_may_not_use_and_freeze_once():
    """Frozen again, a model that stays loaded, as in the page's process, would never be freed."""
    names = "tasks.fit.fit", "tasks.dry_run.dry_run"
    again = f"a = gc.get_freeze_count(); import_task('{names[0]}'); assert gc.get_freeze_count() == a"
    code = f"import gc; from cli.check_keys import import_task; [import_task(name) for name in {names}]; {again}"
    modules, frozen = loaded(code)
    assert UNUSED & modules == set()
    assert frozen > 500_000


@pytest.mark.slow
def test_a_prediction_with_a_lora_loads_no_library_that_it_does_not_use(trained, photo, tmp_path):
    arguments = [
        f"lora={trained}",
        f"image={photo}",
        "prompt=snow",
        "num_inference_steps=1",
        f"output_dir={tmp_path}/a",
    ]
    modules, frozen = loaded(f"import sys, predict; sys.argv[1:] = {arguments}; predict.main()")
    assert {"peft", "diffusers", "bitsandbytes"} <= modules
    assert UNUSED & modules == set()
    assert frozen > 500_000


def test_an_installation_brings_no_scipy_which_torchmetrics_would_load():
    with (ROOT / "pyproject.toml").open("rb") as file:
        new = {(one, "") for one in tomllib.load(file)["project"]["dependencies"]}
    found = set()
    while new:
        found |= new
        needs = [(Requirement(one), extra) for one, extra in new]
        needs = [need for need, extra in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
        new = {(one, extra) for need in needs for one in requires(need.name) or () for extra in need.extras or ("",)}
        new -= found
    names = {re.match(r"[\w.-]+", one)[0].lower() for one, _ in found if ";" not in one}
    assert "numpy" in names
    assert not {"scipy", "imagehash", "pandas", "scikit-learn"} & names
