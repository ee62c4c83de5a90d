"""Every YAML composes, and what it names accepts its arguments."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tasks.keys import check_keys
from tests.support.commands import ROOT, compose

# Not those that others build on.
FILES = sorted(path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("[!_]*.yaml"))
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("[!_]*.yaml"))
NEEDS = {Path("logger/wandb.yaml"): "wandb"}


def choice(file: Path) -> tuple[str, list[str]]:
    """Return the primary config and the override that include a file."""
    if len(file.parts) == 1:
        return file.stem, []
    primary = "predict" if file == Path("trainer/predict.yaml") or file.parts[0] == "captioner" else "train"
    whose = ["captioner=qwen3_vl"] if file.parent == Path("captioner/quantization") else []
    return primary, [*whose, f"{file.parent}={file.stem}"]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_file_composes_and_its_targets_accept_their_arguments(file, tmp_path):
    if file in NEEDS:
        pytest.importorskip(NEEDS[file])
    primary, overrides = choice(file)
    cfg = compose(primary, *overrides, f"output_dir={tmp_path}")
    check_keys(cfg, primary)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    nodes = [cfg[key] for key in ("model", "data", "trainer", "captioner") if cfg.get(key) is not None]
    nodes += [node for group in ("callbacks", "logger") for node in cfg.get(group, {}).values()]
    for node in nodes:
        instantiate(node)
    if "optimizer" in cfg:
        optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2))])
        instantiate(cfg.scheduler)(optimizer=optimizer).step()


@pytest.mark.parametrize("name", MODELS)
def test_model_loads_nothing_before_it_is_asked_to(name):
    module = instantiate(compose("train", f"model={name}").model)
    assert module.transformer is None
    assert module.base.components.models() == {}


@pytest.mark.parametrize("name", MODELS)
def test_defaults_stand_in_yaml_once(name):
    """A model's YAML contains only its differences from its base."""
    own = OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml")
    [parent, *_] = own.pop("defaults")
    base = compose("train", f"+model@base={parent}", f"model={name}").base
    assert all(base.get(key) != value for key, value in own.items())


def test_logger_without_its_library_is_one_line(run, tmp_path):
    if find_spec("wandb") is not None:
        pytest.skip("it is installed")
    outcome = run("train", "logger=wandb", f"output_dir={tmp_path / 'run'}", ok=False)
    assert "logger.wandb: " in outcome.error
    assert "pip install" in outcome.error
    assert "encoded" not in outcome.text, "it is said before anything is encoded"
