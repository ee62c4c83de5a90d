"""LoRA files of other programs: each does what it does there."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from peft import PeftModel

from datamodules.errors import UserError
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.families.flux2.native_names import NATIVE_NAMES as FLUX2_NAMES
from lightning_modules.families.qwen_image.module import QwenImageEdit
from lightning_modules.families.z_image.module import ZImage
from lightning_modules.lora_files.arithmetic import relative_change
from lightning_modules.lora_files.delta import LowRank, swap_halves
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import FORMATS, write
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

FAMILIES = {
    "flux": (foreign_files.flux, FLUX, FluxKontext),
    "qwen": (foreign_files.qwen, QWEN, QwenImageEdit),
    "z_image": (foreign_files.z_image, Z_IMAGE, ZImage),
}


def base_of(transformer, family):
    names = LayerNames(transformer, family.layers.native)
    return SimpleNamespace(layer_names=names, dtype=transformer.dtype, name="tiny-model")


def apply(path, transformer, family):
    loras = AppliedLoRAs([path])
    base = base_of(transformer, family)
    loras.load(transformer, base)


def relative_error(got, expected):
    return float((got.float() - expected.float()).norm() / expected.float().norm())


REAL = (24, 128, (16, 56, 56))


@pytest.mark.parametrize("sizes", [(), pytest.param(REAL, marks=pytest.mark.slow)], ids=["tiny", "real width"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_file_does_what_its_weights_say(tmp_path, family, sizes):
    build, groups, family_class = FAMILIES[family]
    transformer, dense = build(*sizes), build(*sizes)
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
        apply(path, transformer, family_class)
        assert relative_error(velocity(transformer), expected[scale]) < 1e-5, form
        transformer.delete_adapters("lora_0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["diffusers", "kohya", "native with A and B", "PEFT"])
def test_files_in_half_precision(tmp_path, form, dtype):
    build, groups, family = FAMILIES["flux"]
    transformer, dense = build(), build()
    native = {name: tuple(one.to(dtype).float() for one in both) for name, both in draw(transformer, groups).items()}
    ours = of_diffusers(native, groups, transformer)
    path, scale = foreign_file(tmp_path / "file", form, native, ours, dtype)
    add_dense(dense, ours, scale)
    apply(path, transformer, family)
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-3


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_x_flux(tmp_path, prefix):
    transformer, dense = foreign_files.flux(), foreign_files.flux()
    groups = {
        "double_blocks.0.processor.qkv_lora1": FLUX["double_blocks.0.img_attn.qkv"],
        "double_blocks.0.processor.qkv_lora2": FLUX["double_blocks.0.txt_attn.qkv"],
        "double_blocks.0.processor.proj_lora1": FLUX["double_blocks.0.img_attn.proj"],
        "single_blocks.0.processor.qkv_lora": FLUX["single_blocks.0.linear1"][:3],
    }
    native = draw(transformer, groups)
    state = {
        f"{prefix}{name}.{half}.weight": one
        for name, both in native.items()
        for half, one in zip(("down", "up"), both, strict=True)
    }
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    add_dense(dense, of_diffusers(native, groups, transformer), 1.0)
    apply(tmp_path / "x.safetensors", transformer, FluxKontext)
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


@pytest.mark.parametrize("peft", [{"use_rslora": True}, {"alpha_pattern": {"attn.to_q": 2.0}}])
def test_settings_of_peft_are_followed(tmp_path, peft):
    transformer, dense = foreign_files.qwen(), foreign_files.qwen()
    native = draw(transformer, QWEN)
    path, _ = foreign_file(tmp_path, "PEFT", native, native)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | peft))
    for layer, update in native.items():
        alpha = peft.get("alpha_pattern", {}).get("attn.to_q", ALPHA) if layer.endswith("to_q") else ALPHA
        add_dense(dense, {layer: update}, alpha / (RANK**0.5 if peft.get("use_rslora") else RANK))
    apply(path, transformer, QwenImageEdit)
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "dora_scale", "lora_magnitude_vector.default.weight"])
@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_dora_by_all_its_names(tmp_path, form, name):
    """The update W + BA, each row of a length of its own (arXiv 2402.09353)."""
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
    apply(path, transformer, FluxKontext)
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


def test_text_encoders_are_left_out_with_a_note(tmp_path, caplog):
    transformer, dense = foreign_files.flux(), foreign_files.flux()
    native = draw(transformer, FLUX)
    path, scale = foreign_file(tmp_path, "kohya", native, {})
    state = safetensors.torch.load_file(path)
    for key in ("lora_te1_text_model_encoder_layers_0_mlp_fc1", "text_encoder.text_model.encoder.layers.0.mlp.fc1"):
        state |= {f"{key}.lora_down.weight": torch.ones(2, 4), f"{key}.lora_up.weight": torch.ones(4, 2)}
    safetensors.torch.save_file(state, path)
    add_dense(dense, of_diffusers(native, FLUX, transformer), scale)
    with caplog.at_level("INFO", logger="retouch"):
        apply(path, transformer, FluxKontext)
    assert "also contains text encoders: 4 tensors are ignored" in caplog.text
    assert relative_error(velocity(transformer), velocity(dense)) < 1e-5


def rows_of(meaning, up, sides):
    """Rows of a file -> those of each layer."""
    return swap_halves(up, meaning.swapped).split([one.out_features for one in sides])


def named_natively(names):
    """A file of all layers by their native names, and what each layer of diffusers gets of it."""
    assert {layer for layers in names.native.values() for layer in layers} == names.shapes.keys()
    generator = torch.Generator().manual_seed(0)
    state, expected = {}, {}
    for native, layers in names.native.items():
        sides = names.shapes_of(layers)
        down = torch.randn(2, sides[0].in_features, generator=generator)
        up = torch.randn(sum(one.out_features for one in sides), 2, generator=generator)
        state |= {f"{native}.lora_A.weight": down, f"{native}.lora_B.weight": up}
        rows = rows_of(names.meaning(native), up, sides)
        expected |= {layer: (down, part) for layer, part in zip(layers, rows, strict=True)}
    return state, expected


def test_native_names_are_those_of_diffusers_converters():
    """At the width at which these work; where they swap the halves of norm_out they do so in both factors."""
    with torch.device("meta"):
        transformer = foreign_files.FluxTransformer2DModel(guidance_embeds=True)
    state, expected = named_natively(LayerNames(transformer, NATIVE_NAMES))
    for block in ("double_blocks.{}.img_attn", "double_blocks.{}.txt_attn", "single_blocks.{}"):
        for number, half in itertools.product(range(38 if "single" in block else 19), ("query", "key")):
            state[f"{block.format(number)}.norm.{half}_norm.scale"] = torch.ones(1)
    converted = lora_conversion_utils._convert_bfl_flux_control_lora_to_diffusers(dict(state))
    layers = {key.rpartition(".lora_")[0].removeprefix("transformer.") for key in converted if ".lora_" in key}
    assert layers == expected.keys()
    for layer, (down, up) in expected.items():
        assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer
        if layer != "norm_out.linear":
            assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer


def test_native_names_of_flux2_are_those_of_diffusers_converters():
    """Of LoRA files, where it forgets that norm_out's halves are swapped; and of whole models, where it does not."""
    sizes = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16}
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(guidance_embeds=True, **sizes, **heads)
    state, expected = named_natively(LayerNames(transformer, FLUX2_NAMES))
    files = {f"diffusion_model.{key}": tensor for key, tensor in state.items()}
    converted = lora_conversion_utils._convert_non_diffusers_flux2_lora_to_diffusers(files)
    whole = {f"{key.removesuffix('.lora_B.weight')}.weight": up for key, up in state.items() if ".lora_B" in key}
    weights = convert_flux2_transformer_checkpoint_to_diffusers(whole)
    assert len(converted) == 2 * len(weights) == 2 * len(expected)
    for layer, (down, up) in expected.items():
        assert torch.equal(weights[f"{layer}.weight"], up), layer
        assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer
        if layer != "norm_out.linear":
            assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer


def test_native_names_of_z_image_are_those_of_diffusers_converter():
    """As kohya's files have them; of the two layers that it leaves out, as ComfyUI's table of names."""
    with torch.device("meta"):
        transformer = foreign_files.ZImageTransformer2DModel()
    names = LayerNames(transformer, ZImage.layers.native)
    of_comfyui = {
        "x_embedder": ("all_x_embedder.2-1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    }
    natives = names._in_blocks(ZImage.layers.native.read_only)
    same = {name: (name,) for name in names.shapes if not any(name in layers for layers in natives.values())}
    generator = torch.Generator().manual_seed(0)
    state, expected = {}, {}
    for native, layers in (same | natives).items():
        if native in of_comfyui:
            assert of_comfyui.pop(native) == layers
            continue
        sides = names.shapes_of(layers)
        down = torch.randn(2, sides[0].in_features, generator=generator)
        up = torch.randn(sum(one.out_features for one in sides), 2, generator=generator)
        flat = f"lora_unet_{native.replace('.', '_')}"
        state |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up}
        rows = rows_of(names.meaning(flat), up, sides)
        expected |= {layer: (down, part) for layer, part in zip(layers, rows, strict=True)}
    assert not of_comfyui
    converted = lora_conversion_utils._convert_non_diffusers_z_image_lora_to_diffusers(state)
    assert {key.rpartition(".lora_")[0].removeprefix("transformer.") for key in converted} == expected.keys()
    for layer, (down, up) in expected.items():
        assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer
        assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer


def test_another_models_file_is_told_by_its_names_or_widths(tmp_path):
    transformer = foreign_files.flux()
    path, _ = foreign_file(tmp_path / "wide", "kohya", draw(foreign_files.flux(6), FLUX), {})
    with pytest.raises(UserError, match=r"does not fit tiny-model: .* is \d+x\d+, in the model \d+x\d+") as raised:
        apply(path, transformer, FluxKontext)
    assert len(str(raised.value)) < 600
    path, _ = foreign_file(tmp_path / "qwen", "diffusers", {}, draw(foreign_files.qwen(), QWEN))
    with pytest.raises(UserError, match=r"img_mlp.net.0.proj is not in the model") as raised:
        apply(path, transformer, FluxKontext)
    assert "other layers" not in str(raised.value)


def test_a_loader_that_makes_something_else_of_a_file_is_caught(tmp_path, monkeypatch):
    """What diffusers did with `transformer.` and lora_down, lora_up, alpha: it dropped alpha, and nobody was told."""
    transformer = foreign_files.flux()
    native = draw(transformer, FLUX)
    path, _ = foreign_file(tmp_path, "transformer. with down and up", native, of_diffusers(native, FLUX, transformer))
    load = type(transformer).load_lora_adapter

    def without_alpha(self, state, **more):
        state = {key: tensor / (ALPHA / RANK) if "lora_B" in key else tensor for key, tensor in state.items()}
        return load(self, state, **more)

    monkeypatch.setattr(type(transformer), "load_lora_adapter", without_alpha)
    with pytest.raises(UserError, match=r"diffusers read it wrongly: .* differ from the file"):
        apply(path, transformer, FluxKontext)


def test_the_same_layer_by_two_names_is_refused(tmp_path):
    transformer = foreign_files.flux()
    native = draw(transformer, FLUX)
    kohya, _ = foreign_file(tmp_path / "a", "kohya", native, {})
    plain, _ = foreign_file(tmp_path / "b", "diffusers", {}, of_diffusers(native, FLUX, transformer))
    both = safetensors.torch.load_file(kohya) | safetensors.torch.load_file(plain)
    safetensors.torch.save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"x.safetensors contains .* twice, once as "):
        LoRAFile(tmp_path / "x.safetensors").read(LayerNames(transformer, NATIVE_NAMES), "tiny-model")


def mixed_ranks(names, dora=False):
    """Layers of ranks of their own, and one whose name others end with."""
    generator = torch.Generator().manual_seed(0)
    chosen = [name for name in names.shapes if name.endswith(("proj_out", "to_q", "to_k", "to_v", "proj_mlp"))]
    return {
        name: LowRank(
            torch.randn(2 + number % 3, names.shapes[name].in_features, generator=generator),
            torch.randn(names.shapes[name].out_features, 2 + number % 3, generator=generator),
            torch.rand(names.shapes[name].out_features, generator=generator) + 0.5 if dora else None,
        )
        for number, name in enumerate(chosen)
    }


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya", "peft", "onetrainer"])
def test_layers_of_ranks_of_their_own_are_written_and_read(tmp_path, format):
    transformer = foreign_files.flux()
    names = LayerNames(transformer, NATIVE_NAMES)
    updates = mixed_ranks(names)
    path = tmp_path / (FORMATS[format].file or "x.safetensors")
    write(path, updates, {}, format=format, names=names)
    read = LoRAFile(path).read(names, "tiny-model")
    assert read.keys() == updates.keys()
    assert relative_change(updates, read) < 1e-6
    if format == "peft":
        adapted = PeftModel.from_pretrained(foreign_files.flux(), str(tmp_path))
        dense = foreign_files.flux()
        add_dense(dense, {name: (one.down, one.up) for name, one in updates.items()}, 1.0)
        assert relative_error(velocity(adapted.get_base_model()), velocity(dense)) < 1e-5


def test_a_dora_whose_update_does_not_reach_all_parts_keeps_their_magnitudes(tmp_path):
    names = LayerNames(foreign_files.flux(), NATIVE_NAMES)
    updates = {name: one for name, one in mixed_ranks(names, dora=True).items() if "proj_out" not in name}
    name = next(name for name in updates if name.endswith("to_k"))
    updates[name] = replace(updates[name], up=torch.zeros_like(updates[name].up))
    for number in range(2):  # and what was read is written again
        path = tmp_path / f"{number}.safetensors"
        write(path, updates, {}, format="comfyui", names=names)
        updates = LoRAFile(path).read(names, "tiny-model")
        assert updates[name].rank == 1
        assert not updates[name].up.any()
        assert updates[name].magnitude is not None


def test_a_dora_of_strength_0_is_the_base(tmp_path):
    transformer = foreign_files.flux()
    names = LayerNames(transformer, NATIVE_NAMES)
    write(tmp_path / "x.safetensors", mixed_ranks(names, dora=True), {})
    before = velocity(transformer)
    base = base_of(transformer, FluxKontext)
    loras = AppliedLoRAs([tmp_path / "x.safetensors"])
    loras.load(transformer, base)
    for scale, same in ((1.0, False), (0.0, True), (0.5, False)):
        loras.set_scale(transformer, scale)
        assert torch.equal(velocity(transformer), before) == same
    transformer = foreign_files.flux()
    scales = {"*": 0.0, "*.proj_out": 1.0}
    AppliedLoRAs([tmp_path / "x.safetensors"], scales=scales).load(transformer, base_of(transformer, FluxKontext))
    assert set(lora_layers(transformer)) == {name for name in names.shapes if name.endswith(".proj_out")}
