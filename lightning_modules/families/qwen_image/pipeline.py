"""diffusers' Qwen pipelines for condition images that are latents."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image
from torch import Tensor

from lightning_modules.families.patches import LatentPipeline
from lightning_modules.families.qwen_image.denoise import image_shapes


@contextmanager
def replaced_shapes(transformer: Any, shapes: Sequence[Any]) -> Iterator[None]:
    """Temporarily call a transformer with these shapes; the pipelines compute them from images of other sizes."""
    hook = transformer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "img_shapes": shapes}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


class LatentControls(LatentPipeline):
    """Mixin of the edit pipelines: condition images that are encoded already."""

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        target = [side // self.vae_scale_factor for side in reversed(size)]
        shapes = image_shapes([target, *(control.shape[-2:] for control in controls)], len(arguments["generator"]))
        with replaced_shapes(self.transformer, shapes):
            stand_in = [Image.new("RGB", (1, 1))]  # for the controls
            return super().edit(controls, size, image=stand_in, **arguments)

    def prepare_latents(self, image: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        latents, _ = super().prepare_latents(None, *args, **kwargs)  # type: ignore[misc]
        return latents, self.packed_controls().to(latents)
