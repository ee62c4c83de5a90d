"""Z-Image's layers in its own code, by whose names files come.

Files are written with diffusers' names: ComfyUI knows these, and musubi's and OneTrainer's models have no others.
"""

from lightning_modules.lora_files.names import NativeNames

# Blocks that see the noisy picture, the text, and both.
BLOCKS = ("noise_refiner.{}", "context_refiner.{}", "layers.{}")
QKV = ("to_q", "to_k", "to_v")

NATIVE_NAMES = NativeNames(
    read_only={
        "x_embedder": ("all_x_embedder.2-1",),
        **{f"{block}.attention.qkv": tuple(f"{block}.attention.{name}" for name in QKV) for block in BLOCKS},
        **{f"{block}.attention.out": (f"{block}.attention.to_out.0",) for block in BLOCKS},
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
    },
    readers="z_image",
)
