"""FLUX.1's layers in Black Forest Labs' own code, by which ComfyUI, kohya's tools and others name them."""

from lightning_modules.lora_files.names import NativeNames

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
IMAGE_QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
TEXT_QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj"))
SINGLE_QKV = tuple(f"{SINGLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
TO_OUT, TO_ADD_OUT = (f"{DOUBLE}.attn.to_out.0",), (f"{DOUBLE}.attn.to_add_out",)
# Names of the T-LoRA authors' attention processors, in all blocks.
PROCESSORS = dict(zip(("to_q", "to_k", "to_v", "to_out", "to_q_proj", "to_k_proj", "to_v_proj"),
                      (*IMAGE_QKV, *TO_OUT, *TEXT_QKV), strict=True))  # fmt: skip
# Endings of the norms of queries and keys, whose scale is called a weight in ComfyUI's newer files.
NORM_ENDS = {
    f".norm.{norm}_norm.{end}": f"{norm[0]}.weight" for norm in ("query", "key") for end in ("scale", "weight")
}

LAYERS = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "double_blocks.{}.img_mod.lin": (f"{DOUBLE}.norm1.linear",),
    "double_blocks.{}.txt_mod.lin": (f"{DOUBLE}.norm1_context.linear",),
    "double_blocks.{}.img_attn.qkv": IMAGE_QKV,
    "double_blocks.{}.txt_attn.qkv": TEXT_QKV,
    "double_blocks.{}.img_attn.proj": TO_OUT,
    "double_blocks.{}.txt_attn.proj": TO_ADD_OUT,
    "double_blocks.{}.img_mlp.0": (f"{DOUBLE}.ff.net.0.proj",),
    "double_blocks.{}.img_mlp.2": (f"{DOUBLE}.ff.net.2",),
    "double_blocks.{}.txt_mlp.0": (f"{DOUBLE}.ff_context.net.0.proj",),
    "double_blocks.{}.txt_mlp.2": (f"{DOUBLE}.ff_context.net.2",),
    "single_blocks.{}.modulation.lin": (f"{SINGLE}.norm.linear",),
    "single_blocks.{}.linear1": (*SINGLE_QKV, f"{SINGLE}.proj_mlp"),
    "single_blocks.{}.linear2": (f"{SINGLE}.proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
NORMS = {
    native + end: norms + own
    for native, norms in (
        ("double_blocks.{}.img_attn", f"{DOUBLE}.attn.norm_"),
        ("double_blocks.{}.txt_attn", f"{DOUBLE}.attn.norm_added_"),
        ("single_blocks.{}", f"{SINGLE}.attn.norm_"),
    )
    for end, own in NORM_ENDS.items()
}
# Several layers of diffusers that are one there.
JOINED = {whole: parts for whole, parts in LAYERS.items() if len(parts) > 1}
NATIVE_NAMES = NativeNames(
    layers=LAYERS,
    # Of x-flux, of the queries, keys and values alone of a single block, of T-LoRA's authors, OneTrainer, DiffSynth.
    read_only={
        "double_blocks.{}.processor.qkv_lora1": IMAGE_QKV,
        "double_blocks.{}.processor.qkv_lora2": TEXT_QKV,
        "double_blocks.{}.processor.proj_lora1": TO_OUT,
        "double_blocks.{}.processor.proj_lora2": TO_ADD_OUT,
        "single_blocks.{}.processor.qkv_lora": SINGLE_QKV,
        "single_blocks.{}.processor.proj_lora": (f"{SINGLE}.proj_out",),
        "single_blocks.{}.linear1_qkv": SINGLE_QKV,
        **{f"{DOUBLE}.attn.processor.{name}_lora": (layer,) for name, layer in PROCESSORS.items()},
        **{f"{SINGLE}.attn.processor.{name}_lora": (f"{SINGLE}.attn.{name}",) for name in ("to_q", "to_k", "to_v")},
        **{f"{whole}.{part}": (layer,) for whole, parts in JOINED.items() for part, layer in enumerate(parts)},
        "blocks.{}.norm1_a.linear": (f"{DOUBLE}.norm1.linear",),
        "blocks.{}.norm1_b.linear": (f"{DOUBLE}.norm1_context.linear",),
        "blocks.{}.attn.a_to_qkv": IMAGE_QKV,
        "blocks.{}.attn.b_to_qkv": TEXT_QKV,
        "blocks.{}.attn.a_to_out": TO_OUT,
        "blocks.{}.attn.b_to_out": TO_ADD_OUT,
        "blocks.{}.ff_a.0": (f"{DOUBLE}.ff.net.0.proj",),
        "blocks.{}.ff_a.2": (f"{DOUBLE}.ff.net.2",),
        "blocks.{}.ff_b.0": (f"{DOUBLE}.ff_context.net.0.proj",),
        "blocks.{}.ff_b.2": (f"{DOUBLE}.ff_context.net.2",),
        "single_blocks.{}.norm.linear": (f"{SINGLE}.norm.linear",),
        "single_blocks.{}.to_qkv_mlp": (*SINGLE_QKV, f"{SINGLE}.proj_mlp"),
        "single_blocks.{}.proj_out": (f"{SINGLE}.proj_out",),
    },
    # There shift and scale, in diffusers scale and shift.
    swapped=("norm_out.linear",),
    readers="flux",
    tensors=NORMS,
)
