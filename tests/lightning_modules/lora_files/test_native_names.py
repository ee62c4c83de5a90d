"""Native names of layers, by which files come: those of diffusers' converters."""

import itertools

import torch
from diffusers import Flux2Transformer2DModel, Flux3Transformer2DModel, Krea2Transformer2DModel
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux3_transformer_checkpoint_to_diffusers,
)

from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.families.flux2.module import NATIVE_NAMES as FLUX2_NAMES
from lightning_modules.families.flux3.module import NATIVE_NAMES as FLUX3_NAMES
from lightning_modules.families.krea2.module import NATIVE_NAMES as KREA2_NAMES
from lightning_modules.families.z_image.module import ZImage
from lightning_modules.lora_files.delta import swap_halves
from lightning_modules.lora_files.names import LayerNames
from tests.support import foreign_files


def rows_of(meaning, up, sides):
    """Return the rows of each layer in the rows of a file."""
    return swap_halves(up, meaning.swapped).split([one.out_features for one in sides])


def named_natively(names, natives=None, key="{}", halves=("lora_A", "lora_B")):
    """Build a file of all layers by their native names, and the expected part of each diffusers layer."""
    natives = natives or names.native
    generator = torch.Generator().manual_seed(0)
    state, expected = {}, {}
    for native, layers in natives.items():
        sides = names.shapes_of(layers)
        down = torch.randn(2, sides[0].in_features, generator=generator)
        up = torch.randn(sum(one.out_features for one in sides), 2, generator=generator)
        name = key.format(native.replace(".", "_") if key.endswith("_{}") else native)
        state |= {f"{name}.{half}.weight": one for half, one in zip(halves, (down, up), strict=True)}
        rows = rows_of(names.meaning(name), up, sides)
        expected |= {layer: (down, part) for layer, part in zip(layers, rows, strict=True)}
    return state, expected


def test_native_names_are_those_of_diffusers_converters():
    """Tested at the width that the converters support; they swap the halves of norm_out in both factors."""
    with torch.device("meta"):
        transformer = foreign_files.FluxTransformer2DModel(guidance_embeds=True)
    names = LayerNames(transformer, NATIVE_NAMES)
    state, expected = named_natively(names)
    assert expected.keys() == names.shapes.keys()
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
    """The converter of LoRA files forgets that norm_out's halves are swapped, that of whole models does not."""
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


def test_native_names_of_flux3_are_those_of_diffusers_converters():
    """The converter of LoRA files knows the blocks only, whose layers runs save by these names."""
    sizes = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16, "cond_in_channels": 16}
    with torch.device("meta"):
        transformer = Flux3Transformer2DModel(**sizes, **heads)
    names = LayerNames(transformer, FLUX3_NAMES)
    state, expected = named_natively(names)
    assert expected.keys() == names.shapes.keys()
    whole = {f"{key.removesuffix('.lora_B.weight')}.weight": up for key, up in state.items() if ".lora_B" in key}
    weights = convert_flux3_transformer_checkpoint_to_diffusers(whole)
    for layer, (_, up) in expected.items():
        assert torch.equal(weights[f"{layer}.weight"], up), layer
    saved, of_blocks = named_natively(names, names.saved)
    files = {f"diffusion_model.{key}": tensor for key, tensor in saved.items()}
    converted = lora_conversion_utils._convert_non_diffusers_flux3_lora_to_diffusers(files)
    assert of_blocks.keys() == {layer for layer in names.shapes if "blocks." in layer}
    for layer, (down, up) in of_blocks.items():
        assert torch.equal(converted.pop(f"transformer.{layer}.lora_A.weight"), down), layer
        assert torch.equal(converted.pop(f"transformer.{layer}.lora_B.weight"), up), layer
    assert not converted


def test_native_names_of_z_image_are_those_of_diffusers_converter():
    """Names are those of kohya's files, and for the two layers missing there, those of ComfyUI's table."""
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
    found = same | natives
    assert {native: found.pop(native) for native in of_comfyui} == of_comfyui
    state, expected = named_natively(names, found, "lora_unet_{}", ("lora_down", "lora_up"))
    converted = lora_conversion_utils._convert_non_diffusers_z_image_lora_to_diffusers(state)
    assert {key.rpartition(".lora_")[0].removeprefix("transformer.") for key in converted} == expected.keys()
    for layer, (down, up) in expected.items():
        assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer
        assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer


def test_native_names_of_krea2_are_those_of_diffusers_converter():
    """Every linear layer has a native name, as in ai-toolkit's files."""
    with torch.device("meta"):
        transformer = Krea2Transformer2DModel(num_layers=2)
    names = LayerNames(transformer, KREA2_NAMES)
    state, expected = named_natively(names, None, "diffusion_model.{}")
    converted = lora_conversion_utils._convert_non_diffusers_krea2_lora_to_diffusers(state)
    assert expected.keys() == names.shapes.keys()
    assert len(converted) == 2 * len(expected)
    for layer, (down, up) in expected.items():
        assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer
        assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer
