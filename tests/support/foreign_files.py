"""LoRA files as other programs write them, made by hand, and the dense updates that they are."""

import json
from pathlib import Path

import safetensors.torch
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, ZImageTransformer2DModel
from torch import Tensor

from lightning_modules.lora_files.delta import swap_halves
from lightning_modules.lora_files.names import LayerNames, NativeNames, in_blocks

# In the model's own code one layer, in diffusers those named; by its first letters what a program trains.
FLUX = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{one}_proj" for one in "qkv"],
    "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
    "double_blocks.0.txt_mlp.0": ["transformer_blocks.0.ff_context.net.0.proj"],
    "double_blocks.0.img_mod.lin": ["transformer_blocks.0.norm1.linear"],
    "single_blocks.0.linear1": [
        *(f"single_transformer_blocks.0.attn.to_{one}" for one in "qkv"),
        "single_transformer_blocks.0.proj_mlp",
    ],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
    "single_blocks.0.modulation.lin": ["single_transformer_blocks.0.norm.linear"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    "img_in": ["x_embedder"],
}
QWEN = {
    name: [name]
    for name in (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.attn.to_add_out",
        "transformer_blocks.1.img_mlp.net.0.proj",
        "transformer_blocks.1.img_mod.1",
        "img_in",
    )
}
Z_IMAGE = {
    **{
        f"{block}.0.attention.qkv": [f"{block}.0.attention.to_{one}" for one in "qkv"]
        for block in ("noise_refiner", "context_refiner", "layers")
    },
    "layers.0.attention.out": ["layers.0.attention.to_out.0"],
    **{name: [name] for name in ("layers.0.feed_forward.w1", "noise_refiner.0.feed_forward.w2")},
    **{name: [name] for name in ("layers.0.adaLN_modulation.0", "t_embedder.mlp.0", "cap_embedder.1")},
    "x_embedder": ["all_x_embedder.2-1"],
    "final_layer.linear": ["all_final_layer.2-1.linear"],
    "final_layer.adaLN_modulation.1": ["all_final_layer.2-1.adaLN_modulation.1"],
}
RANK, ALPHA = 4, 6.0


def flux() -> FluxTransformer2DModel:
    """Build a random transformer with one double and one single block."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    ).requires_grad_(False)  # fmt: skip


def qwen() -> QwenImageTransformer2DModel:
    """Build a random transformer with two blocks."""
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    ).requires_grad_(False)  # fmt: skip


def z_image() -> ZImageTransformer2DModel:
    """Build a random transformer with one block of each kind."""
    torch.manual_seed(0)
    return ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=1, n_refiner_layers=1, n_heads=3, n_kv_heads=3,
        cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[64, 8, 8],
    ).requires_grad_(False)  # fmt: skip


@torch.no_grad()
def velocity(transformer: torch.nn.Module) -> Tensor:
    """Run a forward pass on 4x4 image tokens and 5 text tokens."""
    generator = torch.Generator().manual_seed(1)
    dtype = transformer.dtype
    x, text, pooled = (torch.randn(*s, generator=generator).to(dtype) for s in ((1, 16, 16), (1, 5, 32), (1, 32)))
    t = torch.tensor([0.6]).to(dtype)
    if isinstance(transformer, ZImageTransformer2DModel):
        return transformer([x[0].view(4, 1, 8, 8)], t, list(text), return_dict=False)[0][0]
    if isinstance(transformer, QwenImageTransformer2DModel):
        return transformer(
            hidden_states=x, encoder_hidden_states=text, timestep=t, img_shapes=[[(1, 4, 4)]], return_dict=False
        )[0]
    ids = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], dim=1)
    return transformer(
        hidden_states=x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t, img_ids=ids,
        txt_ids=torch.zeros(5, 3), guidance=torch.tensor([2.5]).to(dtype), return_dict=False,
    )[0]  # fmt: skip


def draw(transformer: torch.nn.Module, groups: dict[str, list[str]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw, for each native layer, a down (r, in) and an up (out, r) matrix."""
    generator = torch.Generator().manual_seed(3)
    drawn = {}
    for native, layers in groups.items():
        modules = [transformer.get_submodule(layer) for layer in layers]
        out, wide = sum(module.out_features for module in modules), modules[0].in_features
        down, up = torch.randn(RANK, wide, generator=generator), torch.randn(out, RANK, generator=generator)
        drawn[native] = down / wide**0.5, up * 0.3
    return drawn


def of_diffusers(drawn, groups, transformer) -> dict[str, tuple[Tensor, Tensor]]:
    """Convert to diffusers' layers, where the halves of norm_out.linear are swapped."""
    found = {}
    for native, layers in groups.items():
        down, up = drawn[native]
        if layers == ["norm_out.linear"]:
            shift, scale = up.chunk(2)
            up = torch.cat([scale, shift])
        widths = [transformer.get_submodule(layer).out_features for layer in layers]
        found |= {layer: (down, rows) for layer, rows in zip(layers, up.split(widths), strict=True)}
    return found


@torch.no_grad()
def add_dense(transformer, updates, scale: float) -> None:
    """Give the transformer's weights the updates."""
    for layer, (down, up) in updates.items():
        weight = transformer.get_submodule(layer).weight
        weight += (scale * (up.double() @ down.double())).to(weight.dtype)


# By row of the table: prefix, whether names are native, whether flat, the halves, and where alpha is.
FORMS = {
    "diffusers": ("transformer.", False, False, "AB", None),
    "diffusers, alpha in the header": ("transformer.", False, False, "AB", "header"),
    "diffusers, alpha beside": ("transformer.", False, False, "AB", "beside"),
    "transformer. with down and up": ("transformer.", False, False, "down/up", "beside"),
    "diffusion_model. with A and B": ("diffusion_model.", False, False, "AB", None),
    "diffusion_model. with down and up": ("diffusion_model.", False, False, "down/up", "beside"),
    "native with A and B": ("diffusion_model.", True, False, "AB", None),
    "native with down and up": ("diffusion_model.", True, False, "down/up", "beside"),
    "native without a prefix": ("", True, False, "AB", None),
    "kohya": ("lora_unet_", True, True, "down/up", "beside"),
    "PEFT": ("base_model.model.", False, False, "AB", "folder"),
    "PEFT, native": ("base_model.model.", True, False, "AB", None),
    "OneTrainer": ("lora_transformer_", False, True, "down/up", "beside"),
    "LyCORIS": ("lycoris_", False, True, "down/up", "beside"),
    "bare": ("", False, False, "AB", None),
    "bare with down and up": ("", False, False, "down/up", "beside"),
    "with the adapter's name": ("", False, False, "default", None),
}


def foreign_file(folder: Path, form: str, native, diffusers, dtype=torch.float32) -> tuple[Path, float]:
    """Write a file of a format, and return the scale of its updates."""
    prefix, by_native, flat, halves, place = FORMS[form]
    names = {
        "AB": ("lora_A.weight", "lora_B.weight"),
        "down/up": ("lora_down.weight", "lora_up.weight"),
        "default": ("lora_A.default.weight", "lora_B.default.weight"),
    }[halves]
    state, metadata = {}, {}
    for layer, (down, up) in (native if by_native else diffusers).items():
        name = prefix + (layer.replace(".", "_") if flat else layer)
        state |= {f"{name}.{names[0]}": down.to(dtype).clone(), f"{name}.{names[1]}": up.to(dtype).clone()}
        if place == "beside":
            state[f"{name}.alpha"] = torch.tensor(ALPHA).to(dtype)
    path = folder / ("adapter_model.safetensors" if place == "folder" else "lora.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    if place == "header":
        metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})}
    if place == "folder":
        settings = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA", "target_modules": list(diffusers)}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.torch.save_file(state, path, metadata)
    return path, 1.0 if place is None else ALPHA / RANK


def native_state(state: dict[str, Tensor], transformer: torch.nn.Module, native: NativeNames) -> dict[str, Tensor]:
    """Rename a transformer's tensors, and join and swap its layers, as in a file of its authors.

    Args:
        state: by diffusers' names; the dtypes and the sizes of all dimensions but the first are arbitrary.
        transformer: it may be on the meta device.
        native: if a tensor has several names, the first is used.
    """
    names, left, found = LayerNames(transformer, native), dict(state), {}
    for name, layers in (names.native | in_blocks(native.read_only, names.shapes)).items():
        for part in ("weight", "bias"):
            keys = [f"{layer}.{part}" for layer in layers]
            if all(key in left for key in keys):
                joined = torch.cat([left.pop(key) for key in keys])
                found[f"{name}.{part}"] = swap_halves(joined, names.meaning(name).swapped)
    for name, key in native.tensors.items():
        for number in range(100) if "{}" in key else [0]:
            if (own := key.format(number)) in left:
                tensor = left.pop(own)
                # Krea 2's authors have vectors for the blocks' tables.
                found[name.format(number)] = tensor.flatten() if name.endswith("{}.mod.lin") else tensor
    return found | left
