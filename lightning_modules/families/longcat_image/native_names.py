"""LongCat's layers as ComfyUI names them, to which it is one of FLUX.1's."""

from lightning_modules.families.flux import native_names as flux

NATIVE_NAMES = flux.NATIVE_NAMES._replace(
    layers={
        **flux.NATIVE_NAMES.layers,
        "time_in.in_layer": ("time_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_embed.timestep_embedder.linear_2",),
    },
    readers="longcat",
)
