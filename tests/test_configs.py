"""Every YAML composes, what it names accepts its arguments, and its numbers and switches have a rule."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from tasks.check_keys import check_keys
from tasks.check_values import RULES, check_ranges
from tests.support.commands import ROOT, compose

# Not those that others build on.
FILES = sorted(path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("[!_]*.yaml"))
NEEDS = {Path("logger/wandb.yaml"): "wandb"}
# torchmetrics checks its own arguments; the other is a choice of words, among them true.
ELSEWHERE = ("callbacks.validation.metrics.", "adapter.init_lora_weights", "model.recipe.init_lora_weights")


def choice(file: Path) -> tuple[str, list[str]]:
    """Return the primary config and the override that include a file."""
    if len(file.parts) == 1:
        return file.stem, []
    primary = "predict" if file == Path("trainer/predict.yaml") or file.parts[0] == "captioner" else "train"
    whose = ["captioner=qwen3_vl"] if file.parent == Path("captioner/quantization") else []
    return primary, [*whose, f"{file.parent}={file.stem}"]


def leaves(node: DictConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings with a value of their own, not by interpolation of another, by name."""
    for name in node:
        is_computed = path and OmegaConf.is_interpolation(node, name) and not isinstance(node[name], int | float)
        if str(name).startswith("_") or is_computed:
            continue
        if isinstance(node[name], DictConfig):
            yield from leaves(node[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", node[name]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_file_composes_and_its_targets_accept_their_arguments(file, tmp_path):
    if file in NEEDS:
        pytest.importorskip(NEEDS[file])
    primary, overrides = choice(file)
    cfg = compose(primary, *overrides, f"output_dir={tmp_path}")
    check_keys(cfg, primary)
    check_ranges(cfg, primary)
    for key, value in leaves(cfg):
        numbers = list(value) if isinstance(value, ListConfig) else [value]
        if any(isinstance(one, int | float) for one in numbers) and not key.startswith(ELSEWHERE):
            assert key in RULES[primary], f"{key}={value} has no rule in tasks/check_values.py"
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    nodes = [cfg[key] for key in ("data", "trainer", "captioner") if cfg.get(key) is not None]
    nodes += [node for group in ("callbacks", "logger") for node in cfg.get(group, {}).values()]
    for node in nodes:
        instantiate(node)
    module = instantiate(cfg.model)
    assert module.transformer is None, "nothing is loaded yet"
    assert module.base.components.models() == {}
    if "optimizer" in cfg:
        optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2))])
        instantiate(cfg.scheduler)(optimizer=optimizer).step()


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed")
def test_logger_without_its_library_is_one_line(refuses):
    refuses("logger=wandb", words=("logger.wandb: ", "pip install"))
