"""LoRA files of other programs: each does what it does there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from peft import PeftModel

from foundation.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.lora_files.compatibility import in_comfyui
from lightning_modules.lora_files.delta import relative_change
from lightning_modules.lora_files.names import LayerShape
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import LORA_FORMATS, encode, write
from tests.support import foreign_files
from tests.support.foreign_files import (
    ALPHA,
    FLUX,
    FORMS,
    QWEN,
    RANK,
    Z_IMAGE,
    add_dense,
    draw,
    foreign_file,
    of_diffusers,
    velocity,
)
from tests.support.lora_files import dense, layer_names, random_delta

FAMILIES = {
    "flux": (foreign_files.flux, FLUX, "flux_kontext"),
    "qwen": (foreign_files.qwen, QWEN, "qwen_image_edit"),
    "z_image": (foreign_files.z_image, Z_IMAGE, "z_image"),
}


def apply(path, transformer, model, scales=None):
    loras = AppliedLoRAs([path], scales=scales)
    names = layer_names(model, transformer)
    loras.load(transformer, SimpleNamespace(layer_names=names, dtype=transformer.dtype, name="tiny-model"))
    return loras


def relative_error(got, expected):
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="module")
def names():
    return {name: layer_names(model, build()) for name, (build, _, model) in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_file_does_what_its_weights_say(tmp_path, family):
    build, groups, model = FAMILIES[family]
    transformer, dense = build(), build()
    native = draw(transformer, groups)
    ours = of_diffusers(native, groups, transformer)
    before, expected, sum_of_scales = velocity(dense), {}, 0.0
    for scale in (1.0, ALPHA / RANK):
        add_dense(dense, ours, scale - sum_of_scales)
        expected[scale], sum_of_scales = velocity(dense), scale
    assert relative_error(before, expected[1.0]) > 0.01, "the file does something"
    assert relative_error(expected[ALPHA / RANK], expected[1.0]) > 0.01, "its scale does something"
    for form in FORMS:
        path, scale = foreign_file(tmp_path / form, form, native, ours)
        apply(path, transformer, model)
        assert relative_error(velocity(transformer), expected[scale]) < 1e-5, form
        transformer.delete_adapters("lora_0")


def test_x_flux(tmp_path):
    transformer, dense = foreign_files.flux(), foreign_files.flux()
    groups = {
        "double_blocks.0.processor.qkv_lora1": FLUX["double_blocks.0.img_attn.qkv"],
        "double_blocks.0.processor.qkv_lora2": FLUX["double_blocks.0.txt_attn.qkv"],
        "double_blocks.0.processor.proj_lora1": FLUX["double_blocks.0.img_attn.proj"],
        "single_blocks.0.processor.qkv_lora": FLUX["single_blocks.0.linear1"][:3],
    }
    native = draw(transformer, groups)
    state = {
        f"diffusion_model.{name}.{half}.weight": one
        for name, both in native.items()
        for half, one in zip(("down", "up"), both, strict=True)
    }
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    add_dense(dense, of_diffusers(native, groups, transformer), 1.0)
    apply(tmp_path / "x.safetensors", transformer, "flux_kontext")
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("diffusers", "lora_magnitude_vector"),
        ("diffusers", "lora_magnitude_vector.default.weight"),
        ("diffusers", "magnitude"),
        ("kohya", "dora_scale"),
    ],
)
def test_dora_by_all_its_names(tmp_path, form, name):
    """The expected weight is W + BA with a new length for each row (arXiv 2402.09353)."""
    transformer, dense = foreign_files.flux(), foreign_files.flux()
    groups = {name: layers for name, layers in FLUX.items() if "final" not in name}
    native = draw(transformer, groups)
    ours = of_diffusers(native, groups, transformer)
    path, scale = foreign_file(tmp_path, form, native, ours)
    state = safetensors.torch.load_file(path)
    prefix, by_native, flat, *_ = FORMS[form]
    lengths = {layer: torch.rand(transformer.get_submodule(layer).out_features) + 0.5 for layer in ours}
    for layer, layers in groups.items() if by_native else ((layer, [layer]) for layer in ours):
        rows = torch.cat([lengths[one] for one in layers])
        key = prefix + (layer.replace(".", "_") if flat else layer)
        state[f"{key}.{name}"] = rows[:, None].contiguous() if name == "dora_scale" else rows
    safetensors.torch.save_file(state, path)
    add_dense(dense, ours, scale)
    with torch.no_grad():
        for layer, length in lengths.items():
            weight = dense.get_submodule(layer).weight
            weight *= (length / weight.norm(dim=1))[:, None]
    apply(path, transformer, "flux_kontext")
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


def test_the_same_layer_by_two_names_is_refused(tmp_path):
    transformer = foreign_files.flux()
    native = draw(transformer, FLUX)
    kohya, _ = foreign_file(tmp_path / "a", "kohya", native, {})
    plain, _ = foreign_file(tmp_path / "b", "diffusers", {}, of_diffusers(native, FLUX, transformer))
    both = safetensors.torch.load_file(kohya) | safetensors.torch.load_file(plain)
    safetensors.torch.save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"x.safetensors contains .* twice, once as "):
        LoRAFile(tmp_path / "x.safetensors").read(layer_names("flux_kontext", transformer), "tiny-model")


def mixed_ranks(names, dora=False):
    """Build layers with different ranks, and one whose name is the ending of others."""
    chosen = [name for name in names.shapes if name.endswith(("proj_out", "to_q", "to_k", "to_v", "proj_mlp"))]
    return {name: random_delta(names.shapes[name], 2 + index % 3, index, dora) for index, name in enumerate(chosen)}


def test_layers_of_ranks_of_their_own_are_read_by_peft(tmp_path):
    transformer, dense = foreign_files.flux(), foreign_files.flux()
    names = layer_names("flux_kontext", transformer)
    updates = mixed_ranks(names)
    path = tmp_path / LORA_FORMATS["peft"].file
    write(path, updates, {}, format="peft", names=names)
    read = LoRAFile(path).read(names, "tiny-model")
    assert read.keys() == updates.keys()
    assert relative_change(updates, read) < 1e-6
    adapted = PeftModel.from_pretrained(transformer, str(tmp_path))
    add_dense(dense, {name: (one.down, one.up) for name, one in updates.items()}, 1.0)
    assert relative_error(velocity(adapted.get_base_model()), velocity(dense)) < 1e-5


def test_a_dora_whose_update_does_not_reach_all_parts_keeps_their_magnitudes(tmp_path):
    names = layer_names("flux_kontext", foreign_files.flux())
    updates = {name: one for name, one in mixed_ranks(names, dora=True).items() if "proj_out" not in name}
    name = next(name for name in updates if name.endswith("to_k"))
    updates[name] = replace(updates[name], up=torch.zeros_like(updates[name].up))
    write(tmp_path / "x.safetensors", updates, {}, format="comfyui", names=names)
    found = LoRAFile(tmp_path / "x.safetensors").read(names, "tiny-model")[name]
    assert not found.up.any()
    torch.testing.assert_close(found.magnitude, updates[name].magnitude)


def test_a_dora_of_strength_0_is_the_base(tmp_path):
    transformer = foreign_files.flux()
    names = layer_names("flux_kontext", transformer)
    write(tmp_path / "x.safetensors", mixed_ranks(names, dora=True), {})
    before = velocity(transformer)
    loras = apply(tmp_path / "x.safetensors", transformer, "flux_kontext")
    for scale, same in ((1.0, False), (0.0, True), (0.5, False)):
        loras.set_scale(transformer, scale)
        assert torch.equal(velocity(transformer), before) == same
    transformer = foreign_files.flux()
    apply(tmp_path / "x.safetensors", transformer, "flux_kontext", {"*": 0.0, "*.proj_out": 1.0})
    assert set(lora_layers(transformer)) == {name for name in names.shapes if name.endswith(".proj_out")}


LAYER = "transformer_blocks.0.attn.to_q"
Q, OUT = "layers.0.attention.to_q", "norm_out.linear"
Z, F, QWEN_IMAGE = "z_image", "flux", "qwen"


@pytest.mark.parametrize(
    ("model", "format", "layer", "key"),
    [
        (F, "diffusers", OUT, "transformer.norm_out.linear.lora_A.weight"),
        (F, "comfyui", OUT, "diffusion_model.final_layer.adaLN_modulation.1.lora_A.weight"),
        (F, "kohya", OUT, "lora_unet_final_layer_adaLN_modulation_1.lora_down.weight"),
        (F, "peft", OUT, "base_model.model.norm_out.linear.lora_A.weight"),
        (F, "onetrainer", OUT, "lora_transformer_norm_out_linear.lora_down.weight"),
        (Z, "diffusers", Q, "transformer.layers.0.attention.to_q.lora_A.weight"),
        (Z, "comfyui", Q, "diffusion_model.layers.0.attention.to_q.lora_A.weight"),
        (Z, "kohya", Q, "lora_unet_layers_0_attention_to_q.lora_down.weight"),
        (Z, "onetrainer", Q, "transformer.layers.0.attention.to_q.lora_down.weight"),
        (QWEN_IMAGE, "onetrainer", LAYER, f"transformer.{LAYER}.lora_down.weight"),
    ],
)
def test_names_in_a_file_are_those_of_its_program(names, model, format, layer, key):
    """Z-Image's queries, keys and values stay apart, as all its programs have them."""
    tensors = encode({layer: random_delta(names[model].shapes[layer])}, format, names[model])
    assert key in tensors
    assert not [name for name in tensors if "qkv" in name]
    alphas = [one for name, one in tensors.items() if name.endswith(".alpha")]
    assert alphas == ([torch.tensor(2.0)] if format in ("kohya", "onetrainer") else [])


def test_onetrainers_names_of_qwen_image_2_1_are_those_of_qwen_image(tmp_path):
    layers = [LAYER, "transformer_blocks.0.img_mlp.proj"]
    names = layer_names("qwen_image_2_1", dict.fromkeys(layers, LayerShape(8, 4)))
    updates = {layer: random_delta(names.shapes[layer]) for layer in layers}
    write(tmp_path / "x.safetensors", updates, {}, format="onetrainer", names=names)
    written = LoRAFile(tmp_path / "x.safetensors").shapes
    assert {f"transformer.{layer}.lora_down.weight" for layer in layers} < {*written}
    assert in_comfyui("onetrainer", names, layers).reads


TO_K, TO_OUT = "transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_out.0"


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        *(
            (f"{one}.{LAYER}", LAYER)
            for one in ("pipe.dit", "_orig_mod", "module.transformer", "model.diffusion_model")
        ),
        ("transformer.double_blocks.0.img_attn.qkv.1", TO_K),  # former OneTrainer
        ("transformer_blocks.0.attn.processor.to_q_lora", LAYER),  # T-LoRA's authors
        ("blocks.0.attn.a_to_out", TO_OUT),  # DiffSynth
    ],
)
def test_other_names_of_a_layer_are_known_and_what_is_no_layer_is_left_out(names, tmp_path, key, layer):
    update = random_delta(names["flux"].shapes[layer])
    down, up = ("down", "up") if key.endswith("_lora") else ("lora_down", "lora_up")
    halves = {f"{key}.{down}.weight": update.down, f"{key}.{up}.weight": update.up}
    others = {
        f"transformer.{layer}.diff_b": torch.ones(64),
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff": torch.ones(16),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(2, 4),
        "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_up.weight": torch.ones(4, 2),
        "bundle_emb.cat.clip_l": torch.ones(1, 4),
    }
    safetensors.torch.save_file(halves | others, tmp_path / "a.safetensors")
    [(found, again)] = LoRAFile(tmp_path / "a.safetensors").read(names["flux"], "flux").items()
    assert found == layer
    torch.testing.assert_close(dense(again), dense(update))


def test_layers_that_cannot_be_fused_keep_diffusers_names_for_comfyui(names, tmp_path):
    """The default DoRA of FLUX.1 adapts single blocks without proj_mlp, a part of linear1 in ComfyUI."""
    layers = [f"single_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    shapes = names["flux"].shapes
    updates = {layer: random_delta(shapes[layer], seed=seed, dora=True) for seed, layer in enumerate(layers)}
    path = tmp_path / "dora.safetensors"
    write(path, updates, {}, format="comfyui", names=names["flux"])
    state = safetensors.torch.load_file(path)
    assert f"transformer.{layers[0]}.dora_scale" in state
    with pytest.raises(UserError, match=r"only some have DoRA\. Choose format=comfyui or"):
        encode(updates, "kohya", names["flux"])
    again = LoRAFile(path).read(names["flux"], "flux")
    for layer, update in updates.items():
        torch.testing.assert_close(again[layer].magnitude, update.magnitude)
        torch.testing.assert_close(dense(again[layer]), dense(update))
