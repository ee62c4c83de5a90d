"""LoRA files as other programs write and read them: right values, names of theirs letter for letter, or one line."""

import json
import logging

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from datamodules.errors import UserError
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.find import find_or_download
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import write
from tests.support.foreign_files import flux, qwen, z_image
from tests.support.lora_files import dense, layer_names

BUILDERS = {"flux_kontext": flux, "qwen_image_edit": qwen, "z_image": z_image}
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def names():
    return {model: layer_names(model, build()) for model, build in BUILDERS.items()}


def update_of(names, layer, seed=0):
    out, width = names.shapes[layer].out_features, names.shapes[layer].in_features
    generator = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(2, width, generator=generator), torch.randn(out, 2, generator=generator))


def written(path, tensors):
    safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return LoRAFile(path)


@pytest.mark.parametrize(
    ("format", "key"),
    [
        ("comfyui", "diffusion_model.layers.0.attention.to_q.lora_A.weight"),
        ("kohya", "lora_unet_layers_0_attention_to_q.lora_down.weight"),
        ("onetrainer", "transformer.layers.0.attention.to_q.lora_down.weight"),
        ("diffusers", "transformer.layers.0.attention.to_q.lora_A.weight"),
    ],
)
def test_z_images_queries_keys_and_values_are_written_apart(names, tmp_path, format, key):
    layers = [f"layers.0.attention.{name}" for name in ("to_q", "to_k", "to_v")]
    updates = {layer: update_of(names["z_image"], layer, seed) for seed, layer in enumerate(layers)}
    path = tmp_path / "lora.safetensors"
    write(path, updates, {}, format=format, names=names["z_image"])
    assert key in load_file(path)
    assert not [name for name in load_file(path) if "qkv" in name]
    again = LoRAFile(path).read(names["z_image"], "z_image")
    assert again.keys() == updates.keys()
    for layer, update in updates.items():
        torch.testing.assert_close(dense(again[layer]), dense(update), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "layer", "key"),
    [
        ("qwen_image_edit", LAYER, f"transformer.{LAYER}"),
        ("flux_kontext", LAYER, f"lora_transformer_{LAYER.replace('.', '_')}"),
    ],
)
def test_onetrainer_gets_the_names_that_it_reads(names, tmp_path, model, layer, key):
    path = tmp_path / "lora.safetensors"
    write(path, {layer: update_of(names[model], layer)}, {}, format="onetrainer", names=names[model])
    state = load_file(path)
    assert set(state) == {f"{key}.lora_down.weight", f"{key}.lora_up.weight", f"{key}.alpha"}
    assert float(state[f"{key}.alpha"]) == 2.0


@pytest.mark.parametrize(
    "prefix",
    [
        *("pipe.dit.", "_orig_mod.", "module.", "unet.", "transformer._orig_mod.", "module.transformer."),
        *("base_model.model.", "model.diffusion_model.", "dit.", "transformer._fsdp_wrapped_module."),
    ],
)
def test_what_wraps_a_model_in_training_is_no_part_of_a_layers_name(names, tmp_path, prefix):
    update = update_of(names["flux_kontext"], LAYER)
    file = written(
        tmp_path / "lora.safetensors",
        {f"{prefix}{LAYER}.lora_A.weight": update.down, f"{prefix}{LAYER}.lora_B.weight": update.up},
    )
    [(layer, found)] = file.read(names["flux_kontext"], "flux_kontext").items()
    assert layer == LAYER
    torch.testing.assert_close(dense(found), dense(update))


def test_a_magnitude_of_ai_toolkit_is_pefts(names, tmp_path):
    update, magnitude = update_of(names["flux_kontext"], LAYER), torch.rand(64) + 0.5
    start = f"transformer.{LAYER}"
    halves = {f"{start}.lora_A.weight": update.down, f"{start}.lora_B.weight": update.up}
    found = written(tmp_path / "a.safetensors", halves | {f"{start}.magnitude": magnitude})
    assert torch.equal(found.read(names["flux_kontext"], "flux_kontext")[LAYER].magnitude, magnitude)


def test_what_stands_beside_the_layers_is_left_out_and_counted(names, tmp_path, caplog):
    update, start = update_of(names["flux_kontext"], LAYER), f"transformer.{LAYER}"
    halves = {f"{start}.lora_A.weight": update.down, f"{start}.lora_B.weight": update.up}
    beside = {
        f"{start}.diff_b": torch.ones(64),
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff": torch.ones(16),
    }
    with caplog.at_level(logging.WARNING, "retouch"):
        logging.getLogger("retouch").addHandler(caplog.handler)
        found = written(tmp_path / "a.safetensors", halves | beside).read(names["flux_kontext"], "flux_kontext")
        logging.getLogger("retouch").removeHandler(caplog.handler)
    assert list(found) == [LAYER]
    assert "also contains biases and norms: 2 tensors are ignored" in caplog.text


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        ("transformer.double_blocks.0.img_attn.qkv.1", "transformer_blocks.0.attn.to_k"),  # former OneTrainer
        ("transformer_blocks.0.attn.processor.to_q_lora", LAYER),  # T-LoRA's authors
        ("blocks.0.attn.a_to_out", "transformer_blocks.0.attn.to_out.0"),  # DiffSynth
    ],
)
def test_former_names_of_other_programs_are_known(names, tmp_path, key, layer):
    update = update_of(names["flux_kontext"], layer)
    ends = ("down.weight", "up.weight") if key.endswith("_lora") else ("lora_down.weight", "lora_up.weight")
    tensors = dict(zip((f"{key}.{end}" for end in ends), (update.down, update.up), strict=True))
    [(found, again)] = written(tmp_path / "a.safetensors", tensors).read(names["flux_kontext"], "flux_kontext").items()
    assert found == layer
    torch.testing.assert_close(dense(again), dense(update))


def test_a_pickle_of_tensors_is_read_and_one_with_code_is_refused_as_such(names, tmp_path):
    """lora.pt of T-LoRA's authors, pytorch_lora_weights.bin of 2023."""
    update = update_of(names["flux_kontext"], LAYER)
    tensors = {f"transformer.{LAYER}.lora_A.weight": update.down, f"transformer.{LAYER}.lora_B.weight": update.up}
    torch.save(tensors, tmp_path / "lora.pt")
    found = LoRAFile(tmp_path / "lora.pt").read(names["flux_kontext"], "flux_kontext")[LAYER]
    torch.testing.assert_close(dense(found), dense(update))
    torch.save(tensors | {"hook": print}, tmp_path / "code.pt")
    with pytest.raises(UserError, match="is a pickle that contains more than tensors"):
        LoRAFile(tmp_path / "code.pt")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_updates_of_a_changed_base_are_refused_wherever_peft_says_so(names, tmp_path, start):
    update = update_of(names["flux_kontext"], LAYER)
    halves = {
        f"base_model.model.{LAYER}.lora_A.weight": update.down,
        f"base_model.model.{LAYER}.lora_B.weight": update.up,
    }
    safetensors.torch.save_file(halves, tmp_path / "adapter_model.safetensors")
    settings = {"r": 2, "lora_alpha": 2, "init_lora_weights": start, "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"saved by peft with init_lora_weights={start}"):
        LoRAFile(tmp_path / "adapter_model.safetensors").read(names["flux_kontext"], "flux_kontext")


def test_layers_that_cannot_be_fused_keep_diffusers_names_for_comfyui(names, tmp_path):
    """The default DoRA of FLUX.1: single blocks without proj_mlp, which is a part of linear1 in ComfyUI."""
    layers = [f"single_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    updates = {}
    for seed, layer in enumerate(layers):
        plain = update_of(names["flux_kontext"], layer, seed)
        updates[layer] = LowRank(plain.down, plain.up, torch.rand(len(plain.up)) + 0.5)
    path = tmp_path / "dora.safetensors"
    write(path, updates, {}, format="comfyui", names=names["flux_kontext"])
    state = load_file(path)
    assert f"transformer.{layers[0]}.dora_scale" in state
    again = LoRAFile(path).read(names["flux_kontext"], "flux_kontext")
    for layer, update in updates.items():
        torch.testing.assert_close(again[layer].magnitude, update.magnitude)
        torch.testing.assert_close(dense(again[layer]), dense(update))


def test_a_name_on_the_hub_is_no_missing_file(tmp_path):
    with pytest.raises(UserError) as raised:
        find_or_download("owner/name")
    assert "no such file" not in str(raised.value)
    assert "owner/name" in str(raised.value)
    assert "\n" not in str(raised.value)
