"""Native names of layers and other tensors, by which files come: those of diffusers' converters."""

import re

import pytest
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from foundation.catalogue import CONFIGURATIONS
from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.families.flux2.module import NATIVE_NAMES as FLUX2_NAMES
from lightning_modules.families.flux3.module import NATIVE_NAMES as FLUX3_NAMES
from lightning_modules.families.krea2.module import NATIVE_NAMES as KREA2_NAMES
from lightning_modules.families.longcat_image.module import NATIVE_NAMES as LONGCAT_NAMES
from lightning_modules.families.qwen_image.module import QwenImage
from lightning_modules.families.qwen_image_2_1.module import QwenImage21
from lightning_modules.families.z_image.module import ZImage
from lightning_modules.lora_files.delta import swap_halves
from lightning_modules.lora_files.names import LayerNames, in_blocks
from lightning_modules.pretrained.repository import meta_component
from tests.support import foreign_files

# By configuration the names, and a tensor in the authors' files that the transformer does not have.
FAMILIES = {
    "black-forest-labs--FLUX.1-Kontext-dev": (NATIVE_NAMES, None),
    "black-forest-labs--FLUX.2-klein-base-4B": (FLUX2_NAMES, None),
    "black-forest-labs--FLUX.2-dev": (FLUX2_NAMES, None),
    "black-forest-labs--flux-3-image-klein-base": (FLUX3_NAMES, "repa_projectors.0.weight"),
    "krea--Krea-2-Raw": (KREA2_NAMES, None),
    "Tongyi-MAI--Z-Image": (ZImage.layers.native, "norm_final.weight"),
    "Qwen--Qwen-Image-2.1": (QwenImage21.layers.native, None),
    "Qwen--Qwen-Image-Edit-2511": (QwenImage.layers.native, None),
}


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


def test_native_names_of_flux3_are_those_of_diffusers_converters():
    """The converter of LoRA files knows the blocks only, whose layers runs save by these names."""
    sizes = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 16, "cond_in_channels": 16}
    with torch.device("meta"):
        transformer = Flux3Transformer2DModel(**sizes, **heads)
    names = LayerNames(transformer, FLUX3_NAMES)
    assert named_natively(names)[1].keys() == names.shapes.keys()
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
    natives = in_blocks(ZImage.layers.native.read_only, names.shapes)
    same = {name: (name,) for name in names.shapes if not any(name in layers for layers in natives.values())}
    found = same | natives
    assert {native: found.pop(native) for native in of_comfyui} == of_comfyui
    state, expected = named_natively(names, found, "lora_unet_{}", ("lora_down", "lora_up"))
    converted = lora_conversion_utils._convert_non_diffusers_z_image_lora_to_diffusers(state)
    assert {key.rpartition(".lora_")[0].removeprefix("transformer.") for key in converted} == expected.keys()
    for layer, (down, up) in expected.items():
        assert torch.equal(converted[f"transformer.{layer}.lora_A.weight"], down), layer
        assert torch.equal(converted[f"transformer.{layer}.lora_B.weight"], up), layer


def meta(configuration):
    """Build a real transformer on the meta device."""
    return meta_component(str(CONFIGURATIONS / configuration), "transformer")


def addresses(transformer):
    """Return a number of its own for each row of a linear layer, and for each element of any other tensor."""
    layers, state, start = LayerNames(transformer).shapes, {}, 0
    for name, tensor in transformer.state_dict().items():
        rows = tensor.flatten(1)[:, :1] if name.removesuffix(".weight") in layers else tensor
        state[name] = torch.arange(start, start + rows.numel()).view(rows.shape)
        start += rows.numel()
    return state


def assert_same(converted, state):
    """Compare the addresses in two states."""
    assert converted.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(converted[name], tensor), name


@pytest.mark.parametrize("configuration", FAMILIES)
def test_whole_checkpoints_have_the_tensors_of_diffusers_converters(configuration):
    """Each number of the transformer returns to its place, at the real sizes."""
    native, unused = FAMILIES[configuration]
    transformer = meta(configuration)
    state = addresses(transformer)
    convert = SINGLE_FILE_LOADABLE_CLASSES[type(transformer).__name__]["checkpoint_mapping_fn"]
    files = foreign_files.native_state(state, transformer, native)
    assert not [name for name in state for pattern in native.unused if re.fullmatch(pattern, name)]
    if unused is not None:
        assert any(re.fullmatch(pattern, unused) for pattern in native.unused)
        files[unused] = torch.zeros(1)
    assert_same(convert(files), state)


def test_newer_files_of_flux_call_the_scales_of_norms_weights():
    """ComfyUI reads both; of diffusers' converters that of FLUX.2."""
    transformer = meta("black-forest-labs--FLUX.2-klein-base-4B")
    state = addresses(transformer)
    newer = FLUX2_NAMES._replace(tensors=dict(reversed(FLUX2_NAMES.tensors.items())))
    files = foreign_files.native_state(state, transformer, newer)
    assert "double_blocks.0.txt_attn.norm.key_norm.weight" in files
    assert not any(name.endswith(".scale") for name in files)
    convert = SINGLE_FILE_LOADABLE_CLASSES["Flux2Transformer2DModel"]["checkpoint_mapping_fn"]
    assert_same(convert(files), state)


def test_whole_checkpoints_of_longcat_are_those_of_flux_without_pooled_text():
    """diffusers has no converter of its own for them."""
    transformer = meta("meituan-longcat--LongCat-Image-Edit")
    state = addresses(transformer)
    pooled = {f"vector_in.{end}_layer.{part}": torch.zeros(1) for end in ("in", "out") for part in ("weight", "bias")}
    files = foreign_files.native_state(state, transformer, LONGCAT_NAMES) | pooled
    converted = SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]["checkpoint_mapping_fn"](files)
    named = {name.replace("time_text_embed.timestep", "time_embed.timestep"): one for name, one in converted.items()}
    assert_same({name: one for name, one in named.items() if ".text_embedder." not in name}, state)
