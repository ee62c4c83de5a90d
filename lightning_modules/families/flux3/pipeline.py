"""diffusers' FLUX.3 pipeline for references that are latents."""

from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from lightning_modules.families.patches import LatentPipeline


class LatentFlux3(LatentPipeline):
    """Mixin of Flux3ModularPipeline, of which only the blocks that denoise are used."""

    def __init__(self, scheduler: Any, vae: Any, transformer: Any, **text_components: None) -> None:
        from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoCoreDenoiseStep

        self.steps = deepcopy(Flux3AutoCoreDenoiseStep())  # all pipelines of a process share the original's parts
        super().__init__(self.steps)  # type: ignore[call-arg]
        self.scheduler, self.vae, self.transformer = scheduler, vae, transformer

    def edit(
        self, controls: list[Tensor], size: tuple[int, int], *, guidance_scale: float = 1.0, **arguments: Any
    ) -> Tensor:
        pipeline: Any = self
        pipeline.guider.guidance_scale = guidance_scale if "negative_prompt_embeds" in arguments else 1.0
        for way in self.steps.sub_blocks.values():  # with and without references
            way.sub_blocks["denoise"].progress_bar = pipeline.progress_bar
        references = [pixel_unshuffle(control, 2) for control in controls]  # (B, 4C, H, W), a channel for each token's
        width, height = size
        made = pipeline(
            image_cond_latents=references or None, width=width, height=height, output="latents", **arguments
        )
        return pixel_shuffle(made, 2)
