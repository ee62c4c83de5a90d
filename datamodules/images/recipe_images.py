"""Images that recipes make from other images, and samples with them: condition images of targets, exchanged pairs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from datamodules.images.recipes import CAPTION_PLACE, RECIPES, Chain, hole_mask, instructions, middle
from datamodules.images.samples import Found, ImageFile, Root, Sample, with_words
from foundation.errors import UserError
from foundation.files import Packed, file_signature


@dataclass(frozen=True)
class RecipeImage(Packed):
    """An image that a chain of recipes makes from another one, at the size at which training sees that.

    Its bytes, size and colours as a file are those of the other image.

    Attributes:
        image: the other one.
        seed, name: seed of the run, and name of the sample. With the view and the variant they determine all draws.
        side: side of the square to whose area training shrinks it; 0 for its own size.
        view: the window of the sample's target; None outside of training.
        variant: its number among the condition images of the view.
    """

    image: ImageFile
    chain: Chain
    seed: int
    name: str
    side: int = 0
    view: Any = None
    variant: int = 0

    def read_bytes(self) -> bytes:
        return self.image.read_bytes()

    def signature(self) -> tuple[str, int, int, int]:
        return file_signature(self.image)

    @property
    def recipe(self) -> str:
        """Text that changes with anything that it depends on, besides the other image, the view and the variant."""
        return f"{self.chain.identity} {self.seed} {self.name}"

    def without_recipe(self) -> "RecipeImage":
        """Return the other image as training sees it."""
        return replace(self, chain=replace(self.chain, steps=()))

    def _random(self, step: int) -> np.random.Generator:
        """Return the generator of a step of the chain; -1: of the order of the steps."""
        parts = [self.seed, self.name, self.view, self.variant, step]
        return np.random.default_rng(list(hashlib.sha256(json.dumps(parts).encode()).digest()))

    def _strength(self, step: int) -> tuple[Any, np.random.Generator]:
        """Draw the strength of a step of the chain; return it with the generator for the rest."""
        random = self._random(step)
        return self.chain.steps[step].strength(random), random

    def made_from(self, image: Image.Image) -> Image.Image:
        """Apply the recipes to the other image at its size in training, in RGB or RGBA."""
        made, order = image.convert("RGB"), list(range(len(self.chain.steps)))
        if self.chain.shuffle:
            self._random(-1).shuffle(order)
        for index in order:
            if (draw := RECIPES[self.chain.steps[index].name].draw) is not None:
                made = draw(made, *self._strength(index))
        if image.mode == "RGBA":
            made.putalpha(image.getchannel("A"))
        return made

    def made_from_whole(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Apply the recipes, border included, to the whole other image, resized."""
        width, height = self.kept(size)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        image = image.resize(size, Image.Resampling.LANCZOS).crop((left, top, left + width, top + height))
        return self.made_from(image)

    def mask(self, size: tuple[int, int]) -> Image.Image:
        """Return a mask of its holes."""
        found = Image.new("L", size)
        for index, step in enumerate(self.chain.steps):
            if step.name == "hole":
                found.paste(255, mask=hole_mask(size, *self._strength(index)))
        return found

    def kept(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the middle that remains of an image; the whole size without the recipe border."""
        index = next((number for number, step in enumerate(self.chain.steps) if step.name == "border"), None)
        return size if index is None else middle(size, *self._strength(index))

    def __str__(self) -> str:
        return str(self.image)


def recipe_image_of(sample: Sample) -> RecipeImage | None:
    """Return the image of a sample that a recipe makes: its first condition image, or its target."""
    return next((one for one in (sample.target, *sample.controls[:1]) if isinstance(one, RecipeImage)), None)


def source_of(image: ImageFile) -> ImageFile:
    """Return the image from which a recipe makes this one, or the image itself."""
    return image.image if isinstance(image, RecipeImage) else image


def with_controls(found: Found, roots: Sequence[Root], seed: int) -> Found:
    """Return samples with the condition images that the recipes of their roots make.

    Raises:
        UserError: a sample has a condition image or a mask of its own, or lacks a caption that is needed.
    """
    return replace(found, samples=[_with_control(one, roots[one.root], seed) for one in found.samples])


def with_exchanges(found: Found, roots: Sequence[Root]) -> Found:
    """Return samples of which each root's share leads from the target to the first condition image.

    Raises:
        UserError: one of them has no condition image, has a rejected image, or lacks an instruction.
    """
    samples = list(found.samples)
    for number, root in enumerate(roots):
        own = [index for index, one in enumerate(samples) if one.root == number]
        own.sort(key=lambda index: hashlib.sha256(samples[index].key.encode()).digest())
        for index in own[: round(root.swap * len(own))]:
            samples[index] = _exchanged(samples[index], root)
    return replace(found, samples=samples)


def _with_control(sample: Sample, root: Root, seed: int) -> Sample:
    if (chain := root.control) is None:
        return sample
    place = f"data.control: {sample.key} of {root.path}"
    if sample.controls:
        hint = f"data.control=null, or for this root alone {{path: {root.path}, control: null}}"
        raise UserError(f"{place} has a condition image of its own. Pass {hint}")
    if chain.mask and (sample.mask is not None or root.alpha_mask):
        raise UserError(f"{place} has a mask of its own. Leave it or data.control.mask out")
    if not (prompts := instructions(chain, sample.prompts)):
        raise UserError(f"{place} has no caption, which data.control.prompts contains as {CAPTION_PLACE}")
    name, side = sample.key.removeprefix(f"{root.path}/"), max(root.resolution, default=0)
    image = RecipeImage(sample.target, chain, seed, name, side)
    return replace(sample, controls=(image,), prompts=prompts, mask=image if chain.mask else sample.mask)


def _exchanged(sample: Sample, root: Root) -> Sample:
    """Return a sample that leads from its target to its first condition image."""
    place, prompts = f"data.swap: {sample.key} of {root.path}", sample.swap_prompts or root.swap_prompts
    prompts = tuple(with_words(prompt, root) for prompt in prompts)
    if not sample.controls:
        raise UserError(f"{place} has no condition image to exchange with its target")
    if sample.rejected is not None:
        raise UserError(f"{place} has a rejected image, which belongs to its target. Leave data.swap out")
    if not prompts:
        hint = "data.swap.prompts='[\"remove the hat\"]', X.swap.txt or a column swap_prompt"
        raise UserError(f"{place} has no instruction for the way back. Give it in {hint}")
    first, *others = sample.controls
    exchanged = (sample.target, *others)
    return replace(sample, target=first, controls=exchanged, prompts=prompts, caption_file=None)  # of the other way
