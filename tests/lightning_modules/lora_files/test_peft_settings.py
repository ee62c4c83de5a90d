"""Peft's settings of LoRA files: the scale that they state, and what is said if they contradict the tensors."""

import json
import re

import pytest
import torch

from foundation.errors import UserError
from lightning_modules.lora_files import reading
from lightning_modules.lora_files.kinds import make_delta
from lightning_modules.lora_files.names import split_key
from lightning_modules.lora_files.reading import LoRAFile
from tests.lightning_modules.lora_files.test_reading import GOOD, stored
from tests.support.foreign_files import flux
from tests.support.lora_files import layer_names


@pytest.fixture(scope="module")
def names():
    return layer_names("flux_kontext", flux())


def folder_of(folder, settings, state, metadata=None):
    """Write a folder of peft with these settings beside the usual ones; None leaves one out. Return its weights."""
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["to_q"], "use_dora": False}
    kept = {key: value for key, value in (usual | settings).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    path = folder / "adapter_model.safetensors"
    path.write_bytes(stored(state, metadata))
    return path


def lora(rank, layer="transformer_blocks.0.attn.to_q", out=64, **parts):
    shapes = {"lora_A.weight": (rank, 64), "lora_B.weight": (out, rank)} | parts
    return {f"base_model.model.{layer}.{part}": torch.ones(shape) for part, shape in shapes.items()}


ALPHA = {"base_model.model.transformer_blocks.0.attn.to_q.alpha": torch.tensor(2.0)}
QKV, ONE_Q = "double_blocks.0.img_attn.qkv", "base_model.model.transformer_blocks.0.attn.to_q"
LOKR = {f"{ONE_Q}.{part}": torch.ones(8, 8) for part in ("lokr_w1", "lokr_w2")}
LOKR_FACTORS = {
    f"{ONE_Q}.lokr_{part}": torch.ones(*shape) for part, shape in (("w1", (8, 8)), ("w2_a", (8, 2)), ("w2_b", (2, 8)))
}
FUSED = {"target_modules": ["qkv"]}
HEADER = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})}
CONTRADICTIONS = {
    "rank": ({"r": 8}, lora(4), f"adapter_config.json says r=8, {ONE_Q} is a LoRA and has rank 4. Correct the"),
    "rank of a pattern": ({"rank_pattern": {"attn.to_q": 2}}, lora(4), f"says r=2, {ONE_Q} is a LoRA and has rank 4"),
    "rank of a joined layer": (FUSED, lora(16, QKV, 192), "says r=4, .* is a LoRA and has rank 16"),
    "no multiple": (FUSED, lora(6, QKV, 192), "says r=4, .* is a LoRA and has rank 6"),
    "alpha beside": ({}, lora(4) | ALPHA, f"scale of {ONE_Q} is 0.5 by its alpha and 1 by adapter_config.json"),
    "header": ({}, lora(4), f"scale of {ONE_Q} is 2 by its header and 1 by adapter_config.json", HEADER),
    "DoRA without magnitudes": ({"use_dora": True}, lora(4), f"says use_dora=true, {ONE_Q} is a LoRA"),
    "LoRA with magnitudes": ({}, lora(4, lora_magnitude_vector=(64,)), f"use_dora=false, {ONE_Q} is a DoRA"),
    "LoKr": ({}, LOKR, f"says peft_type=LORA, {ONE_Q} is a LoKr"),
    "rank of a LoKr": ({"peft_type": "LOKR", "alpha": 4}, LOKR_FACTORS, f"says r=4, {ONE_Q} is a LoKr .* of rank 2"),
    "other layers": ({"target_modules": ["to_k"]}, lora(4), f"says target_modules without it, {ONE_Q} is a"),
    "another expression": ({"target_modules": r".*\.to_[kv]"}, lora(4), "says target_modules without it"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_facts_that_contradict_each_other_are_both_named(names, tmp_path, name):
    settings, state, words, *metadata = CONTRADICTIONS[name]
    with pytest.raises(UserError, match=f"contradicts itself: .*{words}"):
        LoRAFile(folder_of(tmp_path, settings, state, *metadata)).read(names, "tiny")


AGREEING = {
    "the components of joined layers": ({"target_modules": ["to_q", "to_k", "to_v"]}, lora(12, QKV, 192), 1),
    "one rank for joined layers": (FUSED | {"lora_alpha": 2}, lora(4, QKV, 192), 0.5),
    "a pattern by the file's name": (FUSED | {"r": 8, "rank_pattern": {"img_attn.qkv": 4}}, lora(4, QKV, 192), 1),
    "a pattern by diffusers' name": ({"r": 8, "rank_pattern": {"^transformer_blocks.0.attn.to_q": 4}}, lora(4), 1),
    "a pattern of alphas": ({"alpha_pattern": {"attn.to_q": 2.0}}, lora(4), 0.5),
    "an equal alpha": ({"lora_alpha": 2}, lora(4) | ALPHA, 0.5),
    "rsLoRA": ({"use_rslora": True}, lora(4), 2),
    "an expression": ({"target_modules": r"transformer_blocks.*\.(to_q|to_k)"}, lora(4), 1),
    "all layers": ({"target_modules": "all-linear"}, lora(4), 1),
    "no kind and no rank": ({"peft_type": None, "r": None, "use_dora": None, "target_modules": None}, lora(4), 1),
    "whole factors": ({"peft_type": "LOKR", "alpha": 8, "lora_alpha": None}, LOKR, 2),
}


@pytest.mark.parametrize("name", AGREEING)
def test_facts_that_agree_give_the_scale(names, tmp_path, name, caplog):
    settings, state, scale = AGREEING[name]
    file = LoRAFile(folder_of(tmp_path, settings, state))
    assert [*file.scales(names).values()] == [scale]
    whole = sum(float(one.matrix().sum()) for one in file.read(names, "tiny").values())
    unscaled = make_delta({split_key(key)[1]: one for key, one in state.items()})
    assert whole == pytest.approx(scale * float(unscaled.matrix().sum()))
    assert "note" not in caplog.text


def test_a_rank_of_null_is_that_of_the_tensors(names, tmp_path):
    path, settings = folder_of(tmp_path, {}, lora(4)), tmp_path / "adapter_config.json"
    settings.write_text(
        settings.read_text().replace('"r": 4', '"r": null').replace('"lora_alpha": 4', '"lora_alpha": 8')
    )
    assert [*LoRAFile(path).scales(names).values()] == [2]


UNSTATED = {
    "peft's names": (lora(4), "x.safetensors"),
    "peft's file": ({key.removeprefix("base_model.model."): one for key, one in lora(4).items()}, "adapter_model"),
    "an alpha of another layer": (GOOD | lora(2, "transformer_blocks.0.attn.to_k") | {
        "base_model.model.transformer_blocks.0.attn.to_k.alpha": torch.tensor(1.0)
    }, "x.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSTATED)
def test_a_scale_that_no_fact_states_is_named(names, tmp_path, name, caplog):
    state, file = UNSTATED[name]
    path = tmp_path / f"{file.removesuffix('.safetensors')}.safetensors"
    path.write_bytes(stored(state))
    LoRAFile(path).read(names, "tiny")
    assert re.search("states no scale for .*to_q: neither .* A scale of 1 is assumed", caplog.text)


def test_programs_whose_files_need_no_alpha_get_no_note(names, tmp_path, caplog):
    (tmp_path / "x.safetensors").write_bytes(stored(GOOD))
    LoRAFile(tmp_path / "x.safetensors").read(names, "tiny")
    assert caplog.text == ""


def test_the_scale_of_a_peft_folder_on_the_hub_is_downloaded_with_it(monkeypatch, tmp_path):
    folder_of(tmp_path, {}, lora(4))
    asked = []
    monkeypatch.setattr(reading, "_names_on_the_hub", lambda repository: ["adapter_model.safetensors"])
    monkeypatch.setattr(reading, "repository_file", lambda _, name: asked.append(name) or tmp_path / name)
    assert reading.find_or_download("owner/name") == tmp_path / "adapter_model.safetensors"
    assert asked == ["adapter_model.safetensors", "adapter_config.json"]
