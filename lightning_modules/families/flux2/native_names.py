"""FLUX.2's layers in Black Forest Labs' own code, by which ComfyUI and others name them."""

from lightning_modules.lora_files.names import NativeNames

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"

NATIVE_NAMES = NativeNames(
    layers={
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "double_blocks.{}.img_attn.qkv": tuple(f"{DOUBLE}.attn.to_{name}" for name in "qkv"),
        "double_blocks.{}.txt_attn.qkv": tuple(f"{DOUBLE}.attn.add_{name}_proj" for name in "qkv"),
        "double_blocks.{}.img_attn.proj": (f"{DOUBLE}.attn.to_out.0",),
        "double_blocks.{}.txt_attn.proj": (f"{DOUBLE}.attn.to_add_out",),
        "double_blocks.{}.img_mlp.0": (f"{DOUBLE}.ff.linear_in",),
        "double_blocks.{}.img_mlp.2": (f"{DOUBLE}.ff.linear_out",),
        "double_blocks.{}.txt_mlp.0": (f"{DOUBLE}.ff_context.linear_in",),
        "double_blocks.{}.txt_mlp.2": (f"{DOUBLE}.ff_context.linear_out",),
        "single_blocks.{}.linear1": (f"{SINGLE}.attn.to_qkv_mlp_proj",),
        "single_blocks.{}.linear2": (f"{SINGLE}.attn.to_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    # There shift and scale, in diffusers scale and shift.
    swapped=("norm_out.linear",),
    readers="flux2",
)
