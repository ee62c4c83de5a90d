"""task=export of T-LoRAs, whose rank follows the timestep."""

import re

import pytest
import torch
from hydra.utils import instantiate

from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.lora_files import dense, relative
from tests.support.tiny_adapters import ADAPTERS


@pytest.fixture
def names(tiny):
    module = instantiate(compose("train", "model=flux_kontext").model, pretrained_model_name_or_path=str(tiny))
    return LayerNames.of(module.base)


def read(path, names):
    return LoRAFile(path).read(names, "tiny")


def weights_of(run):
    return run / "lora" / "last" / "pytorch_lora_weights.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_first_components_are_written_and_the_schedule_is_not(run, learned, names, tmp_path, adapter):
    """An orthogonal T-LoRA's component is two rows: its rank 2 is one of 4 to other programs."""
    lora = learned(adapter)
    text = run("predict", "task=export", f"lora={lora}", "rank=2", "format=kohya", f"output_dir={tmp_path}").text
    [path] = tmp_path.glob("*.safetensors")
    assert path.name == f"{adapter}_rank2_kohya.safetensors"
    width = {"tlora": 1, "ortho_tlora": 2}[adapter]
    before, after = read(weights_of(lora), names), read(path, names)
    for name, one in after.items():
        first = before[name].up[:, : 2 * width].double() @ before[name].down[: 2 * width].double()
        torch.testing.assert_close(dense(one), first, rtol=1e-5, atol=1e-6)
        assert one.rank == 2 * width
    assert relative(before, after) > 0.01
    facts = LoRAFile(path).adapter
    assert "rank_schedule" not in facts
    assert facts["rank"] == 2 * width
    assert LoRAFile(path).trained_scale == LoRAFile(weights_of(lora)).trained_scale == 2.0
    assert "the rank is 2 at every timestep, the T-LoRA's 1 to 4, " in text
    assert re.search(r"The update of the weights is [\d.]+ % of its norm away", text)


@pytest.mark.parametrize("adapter", first(1, ADAPTERS))
def test_training_starts_from_the_constant_rank_as_a_lora(run, learned, arguments, names, tmp_path, adapter):
    lora = learned(adapter)
    run("predict", "task=export", f"lora={lora}", "rank=2", f"output_dir={tmp_path / 'file'}")
    [path] = (tmp_path / "file").glob("*.safetensors")
    rank = {"tlora": 2, "ortho_tlora": 4}[adapter]
    settings = [one for one in arguments("flux_kontext", tmp_path / "run", 1) if one != "adapter.rank=4"]
    run("train", *settings, f"adapter.rank={rank}", f"adapter.init_from={path}", "optimizer.lr=0")
    assert relative(read(path, names), read(weights_of(tmp_path / "run"), names)) < 1e-6


@pytest.mark.parametrize("given", [[], ["rank=5"]])
def test_the_rank_must_be_chosen_and_is_proposed(run, learned, tmp_path, given):
    error = run("predict", "task=export", f"lora={learned('tlora')}", *given, f"output_dir={tmp_path}", ok=False).error
    assert "is a T-LoRA, whose rank follows the timestep" in error
    assert "pass rank=N, from 1, its rank at noise, to 4, what programs use that do not follow the schedule" in error
    mean = float(re.search(r"its mean over 10 sampling steps is ([\d.]+)", error)[1])
    assert f"which is rank={round(mean)}" in error
    assert 1 < mean < 4


def test_the_mean_rank_is_that_of_the_steps_that_are_asked_for(run, learned, tmp_path):
    request = ["task=export", f"lora={learned('tlora')}", "num_inference_steps=1", f"output_dir={tmp_path}"]
    assert "its mean over 1 sampling steps is 1.0, which is rank=1" in run("predict", *request, ok=False).error


def test_a_t_lora_is_not_merged(run, learned, tmp_path):
    one, other = learned("tlora"), learned("lora")
    error = run("predict", "task=export", f"merge=[{other},{one}]", "rank=2", f"output_dir={tmp_path}", ok=False).error
    assert "is a T-LoRA, whose rank follows the timestep: write it with task=export rank=N first" in error


def test_a_schedule_that_masks_nothing_needs_no_rank(run, arguments, names, tmp_path):
    run(
        "train",
        *arguments("flux_kontext", tmp_path / "run", 2, "adapter=ortho_tlora", "adapter.rank_schedule=constant"),
    )
    run("predict", "task=export", f"lora={tmp_path / 'run'}", f"output_dir={tmp_path / 'out'}")
    [path] = (tmp_path / "out").glob("*.safetensors")
    assert relative(read(weights_of(tmp_path / "run"), names), read(path, names)) < 1e-6
    facts = LoRAFile(path).adapter
    assert "rank_schedule" not in facts
    assert (facts["rank"], facts["alpha"]) == (8, 8.0)
