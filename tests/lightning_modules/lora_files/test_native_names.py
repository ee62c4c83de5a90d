"""Native names of layers and other tensors, by which files come: those of diffusers' converters."""

import re

import pytest
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from foundation.catalogue import CONFIGURATIONS
from lightning_modules.lora_files.delta import swap_halves
from lightning_modules.lora_files.names import LayerNames, in_blocks
from lightning_modules.pretrained.repository import meta_component
from tests.support import foreign_files
from tests.support.commands import class_of

# By configuration a model, and a tensor in the authors' files that the transformer does not have.
FAMILIES = {
    "black-forest-labs--FLUX.1-Kontext-dev": ("flux_kontext", None),
    "black-forest-labs--FLUX.2-klein-base-4B": ("flux2_klein_4b", None),
    "black-forest-labs--FLUX.2-dev": ("flux2_dev", None),
    "black-forest-labs--flux-3-image-klein-base": ("flux3_klein", "repa_projectors.0.weight"),
    "krea--Krea-2-Raw": ("krea2", None),
    "Tongyi-MAI--Z-Image": ("z_image", "norm_final.weight"),
    "Qwen--Qwen-Image-2.1": ("qwen_image_2_1", None),
    "Qwen--Qwen-Image-Edit-2511": ("qwen_image_edit_plus", None),
}


def native_of(model):
    return class_of(model).layers.native


def layers_of(lora):
    return {key.rpartition(".lora_")[0].removeprefix("transformer.") for key in lora}


def rows_of(meaning, up, sides):
    """Return the rows of each layer in the rows of a file."""
    return swap_halves(up, meaning.swapped).split([one.out_features for one in sides])


def named_natively(names, natives=None, key="{}", halves=("lora_A", "lora_B")):
    """Build a file of all layers by their native names, and the expected LoRA of diffusers' layers."""
    natives = natives or names.native
    generator = torch.Generator().manual_seed(0)
    state, expected = {}, {}
    for native, layers in natives.items():
        sides = [names.shapes[layer] for layer in layers]
        down = torch.randn(2, sides[0].in_features, generator=generator)
        up = torch.randn(sum(one.out_features for one in sides), 2, generator=generator)
        name = key.format(native.replace(".", "_") if key.endswith("_{}") else native)
        state |= {f"{name}.{half}.weight": one for half, one in zip(halves, (down, up), strict=True)}
        for layer, rows in zip(layers, rows_of(names.meaning(name), up, sides), strict=True):
            expected |= {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": rows}
    return state, expected


def test_native_names_of_flux3_are_those_of_diffusers_converters():
    """The converter of LoRA files knows the blocks only, whose layers runs save by these names."""
    sizes = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16, "cond_in_channels": 16}
    with torch.device("meta"):
        transformer = Flux3Transformer2DModel(**sizes, **heads)
    names = LayerNames(transformer, native_of("flux3_klein"))
    assert layers_of(named_natively(names)[1]) == names.shapes.keys()
    saved, expected = named_natively(names, names.saved)
    files = {f"diffusion_model.{key}": tensor for key, tensor in saved.items()}
    converted = lora_conversion_utils._convert_non_diffusers_flux3_lora_to_diffusers(files)
    assert layers_of(expected) == {layer for layer in names.shapes if "blocks." in layer}
    torch.testing.assert_close(converted, expected, rtol=0, atol=0)


def test_native_names_of_z_image_are_those_of_diffusers_converter():
    """Names are those of kohya's files, and for the two layers missing there, those of ComfyUI's table."""
    with torch.device("meta"):
        transformer = foreign_files.ZImageTransformer2DModel()
    names = LayerNames(transformer, native_of("z_image"))
    of_comfyui = {
        "x_embedder": ("all_x_embedder.2-1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    }
    natives = in_blocks(native_of("z_image").read_only, names.shapes)
    same = {name: (name,) for name in names.shapes if not any(name in layers for layers in natives.values())}
    found = same | natives
    assert {native: found.pop(native) for native in of_comfyui} == of_comfyui
    state, expected = named_natively(names, found, "lora_unet_{}", ("lora_down", "lora_up"))
    converted = lora_conversion_utils._convert_non_diffusers_z_image_lora_to_diffusers(state)
    torch.testing.assert_close(converted, expected, rtol=0, atol=0)


def meta(configuration):
    return meta_component(str(CONFIGURATIONS / configuration), "transformer")


def addresses(transformer):
    """Return a number of its own for each row of a linear layer, and for each element of any other tensor."""
    layers, state, start = LayerNames(transformer).shapes, {}, 0
    for name, tensor in transformer.state_dict().items():
        rows = tensor.flatten(1)[:, :1] if name.removesuffix(".weight") in layers else tensor
        state[name] = torch.arange(start, start + rows.numel()).view(rows.shape)
        start += rows.numel()
    return state


@pytest.mark.parametrize("configuration", FAMILIES)
def test_whole_checkpoints_have_the_tensors_of_diffusers_converters(configuration):
    """Each number of the transformer returns to its place, at the real sizes."""
    model, unused = FAMILIES[configuration]
    native = native_of(model)
    transformer = meta(configuration)
    state = addresses(transformer)
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(transformer).__name__]["checkpoint_mapping_fn"]
    files = foreign_files.native_state(state, transformer, native)
    assert not [name for name in state for pattern in native.unused if re.fullmatch(pattern, name)]
    if unused is not None:
        assert any(re.fullmatch(pattern, unused) for pattern in native.unused)
        files[unused] = torch.zeros(1)
    torch.testing.assert_close(convert(files), state, rtol=0, atol=0)


def test_newer_files_of_flux_call_the_scales_of_norms_weights():
    """ComfyUI reads both; of diffusers' converters that of FLUX.2."""
    transformer = meta("black-forest-labs--FLUX.2-klein-base-4B")
    state = addresses(transformer)
    native = native_of("flux2_klein_4b")
    newer = native._replace(tensors=dict(reversed(native.tensors.items())))
    files = foreign_files.native_state(state, transformer, newer)
    assert "double_blocks.0.txt_attn.norm.key_norm.weight" in files
    assert not any(name.endswith(".scale") for name in files)
    convert = SINGLE_FILE_LOADABLE_CLASSES["Flux2Transformer2DModel"]["checkpoint_mapping_fn"]
    torch.testing.assert_close(convert(files), state, rtol=0, atol=0)


def test_whole_checkpoints_of_longcat_are_those_of_flux_without_pooled_text():
    """diffusers has no converter of its own for them."""
    transformer = meta("meituan-longcat--LongCat-Image-Edit")
    state = addresses(transformer)
    pooled = {f"vector_in.{end}_layer.{part}": torch.zeros(1) for end in ("in", "out") for part in ("weight", "bias")}
    files = foreign_files.native_state(state, transformer, native_of("longcat_image_edit")) | pooled
    converted = SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]["checkpoint_mapping_fn"](files)
    named = {name.replace("time_text_embed.timestep", "time_embed.timestep"): one for name, one in converted.items()}
    used = {name: one for name, one in named.items() if ".text_embedder." not in name}
    torch.testing.assert_close(used, state, rtol=0, atol=0)
