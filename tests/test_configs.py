"""Every YAML composes, and what it names accepts its arguments."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.conftest import ROOT, compose

FILES = sorted(path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml"))


def choice(file: Path) -> tuple[str, list[str]]:
    """The primary config and the override that bring a file in."""
    if len(file.parts) == 1:
        return file.stem, []
    primary = "predict" if file == Path("trainer/predict.yaml") else "train"
    return primary, [f"{file.parent}={file.stem}"]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_file_composes_and_its_targets_accept_their_arguments(file, tmp_path):
    primary, overrides = choice(file)
    cfg = compose(primary, *overrides, f"output_dir={tmp_path}")
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    nodes = [cfg[key] for key in ("model", "data", "trainer") if key in cfg]
    nodes += [node for group in ("callbacks", "logger") for node in cfg.get(group, {}).values()]
    for node in nodes:
        instantiate(node)
    if "optimizer" in cfg:
        optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2))])
        instantiate(cfg.scheduler)(optimizer).step()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")))
def test_model_loads_nothing_before_it_is_asked_to(name):
    module = instantiate(compose("train", f"model={name}").model)
    assert module.transformer is None
    assert module.components.models() == {}


def test_defaults_stand_in_yaml_once():
    """A variant's YAML holds only the difference."""
    base = OmegaConf.load(ROOT / "conf/model/flux_kontext.yaml")
    variant = OmegaConf.load(ROOT / "conf/model/embedded.yaml")
    assert all(base[key] != value for key, value in variant.items() if key != "defaults")
