"""Every YAML composes, what it names accepts its arguments, and its numbers and switches have a rule."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from cli.check_keys import check_keys
from cli.check_values import check_ranges
from foundation.settings import declared
from tests.support.commands import compose

# Groups that go together in any combination: round N chooses each one's N-th option.
COMBINED = "adapter data hparams_search logger model model/quantization objective optimizer scheduler"
# Groups whose options choose others, or belong to one option of another.
ALONE = "callbacks/metrics debug experiment objective/loss"
# torchmetrics checks its own arguments; init_lora_weights is a choice of words, among them true.
ELSEWHERE = (
    "callbacks.validation.metrics.",
    "adapter.init_lora_weights",
    "model.recipe.init_lora_weights",
    "model.optimization.ema.",  # reads ema, which has rules
)


def combinations() -> Iterator[tuple[str, ...]]:
    """Yield choices for train.py and predict.py that contain every option of every group."""
    options = {group: names for group, names in declared("train").groups.items() if group in COMBINED.split()}
    options["logger"] = [name for name in options["logger"] if name != "wandb" or find_spec("wandb")]
    for index in range(max(map(len, options.values()))):
        yield "train", *(f"{group}={names[index % len(names)]}" for group, names in options.items())
    yield from (("train", f"{group}={name}") for group in ALONE.split() for name in declared("train").groups[group])
    yield from (("train", one) for one in ("trainer=fsdp", "hydra/launcher=slurm", "hydra/launcher=slurm_node"))
    for captioner, quantization in (("qwen3_vl", "fp8"), ("qwen2_5_vl", "nf4")):
        yield "predict", f"captioner={captioner}", f"captioner/quantization={quantization}"


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


@pytest.mark.parametrize("choices", combinations(), ids=" ".join)
def test_files_compose_and_their_targets_accept_their_arguments(choices, tmp_path):
    primary, *overrides = choices
    cfg = compose(primary, *overrides, f"output_dir={tmp_path}")
    check_keys(cfg, primary)
    check_ranges(cfg, primary)
    for key, value in leaves(cfg):
        numbers = list(value) if isinstance(value, ListConfig) else [value]
        if any(isinstance(one, int | float) for one in numbers) and not key.startswith(ELSEWHERE):
            assert declared(primary).settings[key].rule is not None, f"{key}={value} has no rule behind its default"
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
