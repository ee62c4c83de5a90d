"""The requests of prediction: each image with each prompt, under each seed and LoRA scale."""

import glob
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.base import Model, PromptData, model_of
from datamodules.batch import PromptRequest, RawBatch
from datamodules.images.captions import text_prompts
from datamodules.images.decoding import floor_size, image_size, verify_image
from datamodules.images.folders import (
    IMAGE_FORMATS,
    IMAGE_SUFFIXES,
    Listing,
    belongs_to_another,
    further_controls,
    is_clutter,
    is_image,
    stem_of,
)
from datamodules.images.samples import CAPTION_SUFFIXES, TRIGGER
from datamodules.images.windows import SAME_PROPORTIONS, ConditionImages, Window
from foundation.errors import UserError, listing, printable
from foundation.files import TABLE, read_text

log = logging.getLogger("retouch")

# Ratio of areas beyond which a result is far from the images of training: its sides differ by more than twice.
FAR = 4


@dataclass
class EditRequest:
    """An image, some prompts for it, and the settings of the results.

    Attributes:
        raw: a sample for each prompt, whose keys begin the names of the results' files; the control images are those
            of the one image, (1, C, h, w) each.
        image: path of the image, or paths of several references; None if the prompt is sampled from without one.
        size: (width, height) that is sampled.
        seeds, lora_scales: each prompt has a result for each pair of them.
        batch_size: results sampled at once.
        box: the part of each that is kept: left, top, right, bottom.
    """

    raw: RawBatch
    image: str | list[str] | None
    size: tuple[int, int]
    seeds: list[int]
    lora_scales: list[float]
    batch_size: int
    box: tuple[int, int, int, int]


class PromptedImage(NamedTuple):
    """An image with prompts for it.

    Attributes:
        paths: paths of the image, and of its further control images or references.
        keys: the beginning of the names of each prompt's results.
    """

    paths: tuple[Path, ...]
    keys: list[str]
    prompts: list[str]


class EditsDataModule(PromptData):
    """Every image with every prompt.

    Args:
        image: a file, a folder or a glob; a list of files is one edit with several references; None samples from the
            prompt only. `X_control_1.*`, ... next to `X.*` are its further control images, as in training.
        prompt: one instruction, or several.
        prompts_file: instead of `prompt`, a UTF-8 file with one instruction per line. Without either, each image has
            its own, in X.txt next to it.
        negative_prompt: encoded as well, unless None.
        seeds, lora_scales: each prompt has a result for each pair of them.
        height, width: size of the result; None for the size at which the model sees the image, or without an image for
            the model's resolution.
        max_area: larger images are shrunk to this many pixels before the edit; None for the area of training.
        batch_size: results of one image that are sampled at once.
        setting: the name of `image` in messages.
        caption_per_line: treat each line of X.txt as a prompt, as in training.
        trigger_word: replaces [trigger] in prompts, as in training; None if the weights name none.
        trained: side of the square whose area the weights were trained at; 0 for the model's.

    Attributes:
        edits: one for each request.
        sizes: (width, height) of each image file.
    """

    def __init__(
        self,
        image: str | Sequence[str] | None,
        prompt: str | Sequence[str] | None,
        prompts_file: str | None,
        negative_prompt: str | None,
        seeds: Sequence[int],
        lora_scales: Sequence[float],
        height: int | None,
        width: int | None,
        max_area: int | None,
        batch_size: int,
        setting: str = "image",
        caption_per_line: bool = True,
        trigger_word: str | None = None,
        trained: int = 0,
    ) -> None:
        super().__init__()
        self.caption_per_line = caption_per_line
        self.setting = setting
        shared = _read_prompts(prompt, prompts_file, required=image is None)
        listing_of = cache(Listing.of)
        names: set[str] = set()
        self.edits: list[PromptedImage] = []
        for paths in find_images(image, setting) if image is not None else [()]:
            # File names may hold any bytes, up to 255 of them; the settings of each result follow the stem.
            stem = printable(paths[0].stem).encode()[:150].decode(errors="ignore") if paths else "image"
            numbered = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))
            names.add(name := next(name for name in numbered if name not in names))
            own = shared or self._own_prompts(paths[0], listing_of(paths[0].parent))
            own = own if trigger_word is None else [prompt.replace(TRIGGER, trigger_word) for prompt in own]
            keys = [f"{name}_p{number:02d}" for number in range(len(own))]
            for first in range(0, len(own), batch_size):
                some = slice(first, first + batch_size)
                self.edits.append(PromptedImage(paths, keys[some], own[some]))
        self.negative_prompt = negative_prompt
        self.seeds = list(seeds)
        self.lora_scales = list(lora_scales)
        self.height = height
        self.width = width
        self.max_area = max_area
        self.batch_size = batch_size
        self.condition_images = ConditionImages()
        self.resolution, self.trained = 0, trained
        if any(TRIGGER in prompt for edit in self.edits for prompt in edit.prompts):
            where = "the LoRA names no trigger word" if setting == "image" else "data.trigger_word is not set"
            log.warning(f"note: {TRIGGER} stays as it is in the prompts of {setting}: {where}")
        # Of the files: a decoded image may already be reduced.
        self.sizes: dict[Path, tuple[int, int]] = {}
        for path in dict.fromkeys(path for edit in self.edits for path in edit.paths):
            self.sizes[path] = image_size(path)
            verify_image(path)

    def _own_prompts(self, path: Path, beside: Listing) -> list[str]:
        prompts, _ = beside.captions(stem_of(path), self.caption_per_line)
        if prompts:
            return list(prompts)
        otherwise = ', or pass prompt="make it snow"' if self.setting == "image" else ""
        raise UserError(
            f"{self.setting}: {path} has no instruction: write it into {path.with_suffix('.txt')}{otherwise}"
        )

    def setup(self, stage: str) -> None:
        self.configure_for(model_of(self.run))

    def configure_for(self, model: Model) -> None:
        """Raise a UserError if the model takes fewer or more images than there are."""
        name, images = model.base.name, model.condition_images
        if model.geometry.equal_text:  # prompts sampled together would have to be of one length
            prompts = [(edit.paths, *one) for edit in self.edits for one in zip(edit.keys, edit.prompts, strict=True)]
            self.edits = [PromptedImage(paths, [key], [prompt]) for paths, key, prompt in prompts]
        self.condition_images, self.resolution = images, model.geometry.resolution
        self.trained = self.trained or self.resolution
        self.max_area = self.max_area or max(self.trained, self.resolution) ** 2
        for side, pixels in (("height", self.height), ("width", self.width)):
            if pixels and pixels % model.geometry.result_multiple:
                multiple = model.geometry.result_multiple
                raise UserError(f"{side}={pixels}: {name} makes images whose sides are multiples of {multiple}")
        for paths, *_ in self.edits:
            if not paths and (images.least > 0 or (images.most != 0 and None in (self.height, self.width))):
                hint = "" if images.least > 0 else "; to sample from the prompt only, give width= and height="
                raise UserError(f"no {self.setting}= to edit, which {name} needs{hint}")
            if paths and images.most == 0:
                raise UserError(f"{name} samples from the prompt only: leave {self.setting}= out")
            if images.most and len(paths) > images.most:
                listed = listing([str(path) for path in paths])
                raise UserError(f"{name} takes at most {images.limit}, but {listed} are {len(paths)}")
        sized = images.sets_target and (self.width or self.height)
        for path in [edit.paths[0] for edit in self.edits if sized and edit.paths]:
            own = images.size(*self.sizes[path], self.max_area)
            width, height = self.width or own[0], self.height or own[1]
            if (width, height) != own and abs(width / height * own[1] / own[0] - 1) < SAME_PROPORTIONS:
                log.warning(
                    f"note: {name} sees {path.name} at {own[0]}x{own[1]}: a result of another size may be zoomed. "
                    "Leave width and height out"
                )
                break

        self._note_other_size()

    def _note_other_size(self) -> None:
        """Log a note if results are much larger or smaller than the images that the weights were trained on."""
        for edit in self.edits:
            (width, height), side = self._windows(edit.paths)[1], self.trained
            if not 1 / FAR <= width * height / side**2 <= FAR:
                hint = f". max_area={side**2} shrinks it" if edit.paths and width * height > side**2 else ""
                what = edit.paths[0].name if edit.paths else "the result"
                log.warning(
                    f"note: {printable(what)} has {width}x{height} pixels here, far from about {side}x{side}, the size "
                    f"of training: expect worse images{hint}"
                )
                break

    def all_prompts(self) -> list[PromptRequest]:
        negative = [] if self.negative_prompt is None else [self.negative_prompt]
        sees = self.condition_images.text_sees_them
        mine = self.share() if sees else self.edits
        wanted = [(prompt, edit.paths if sees else ()) for edit in mine for prompt in (*edit.prompts, *negative)]
        return list(dict.fromkeys(wanted))

    def prompt_images(self, paths: Sequence[Path]) -> list[Tensor]:
        return self.condition_images.load(paths, self._windows(paths)[0])[1]

    def _windows(self, paths: Sequence[Path]) -> tuple[list[Window], tuple[int, int]]:
        """Return the windows of images, and the (width, height) that is sampled."""
        window_of, sizes = self.condition_images.of_count(len(paths)).window, [self.sizes[path] for path in paths]
        windows = [window_of(*one, self.max_area) for one in sizes]
        # On another grid the control would be seen with a zoom.
        own = windows[0].size if paths else (self.resolution, self.resolution)
        size = self.width or own[0], self.height or own[1]
        if self.condition_images.fits_target:
            windows = [self.condition_images.fitted(one, size) for one in sizes]
        elif not self.condition_images.sets_target:
            for index, one in enumerate(sizes):
                width, height = floor_size(*one)
                if width <= size[0] and height <= size[1]:  # the result extends it: one scale, as in training
                    windows[index] = window_of(*one)
        return windows, size

    def share(self) -> list[PromptedImage]:
        return self.edits[self.run.global_rank :: self.run.world_size]

    def predict_dataloader(self) -> DataLoader[PromptedImage]:
        """Return this process's requests, one per batch."""
        processes = self.run.world_size
        if processes > len(self.edits):
            raise UserError(f"{processes} processes for {len(self.edits)} images and prompts: use fewer devices")
        return DataLoader(self.share(), collate_fn=lambda edits: self.request(*edits))  # type: ignore[arg-type]

    def request(self, edit: PromptedImage) -> EditRequest:
        """Return an edit with its images decoded."""
        paths, keys, prompts = edit
        windows, size = self._windows(paths)
        controls, prompt_images = self.condition_images.load(paths, windows)
        images = [printable(str(path)) for path in paths]
        return EditRequest(
            RawBatch(keys, [0] * len(keys), prompts, None, controls, prompt_images=[prompt_images] * len(keys)),
            images if len(images) > 1 else next(iter(images), None),
            size,
            self.seeds,
            self.lora_scales,
            self.batch_size,
            windows[0].inside if paths and not (self.width or self.height) else (0, 0, *size),
        )


def own_edits(root: str, seed: int, max_area: int | None = None, trigger_word: str | None = None) -> EditsDataModule:
    """Return the edits of sample_root: of its images, or without images, samples from its texts."""
    path = Path(str(root)).expanduser()
    no_images = path.is_dir() and not Listing.of(path).images
    named = sorted(path.glob("*.txt")) if no_images else [path] if path.suffix == ".txt" else []
    texts = [one for one in named if not is_clutter(one.name)]
    prompts = [prompt for text in texts for prompt in text_prompts(read_text(text))]
    image = None if texts else root
    settings = (None, [seed], [1.0], None, None, max_area, 1, "sample_root")
    return EditsDataModule(image, prompts, None, *settings, trigger_word=trigger_word)


def find_images(image: str | Sequence[str], setting: str = "image") -> list[tuple[Path, ...]]:
    """Return the images of a file, a folder or a glob, each with its further control images; a list is one edit's.

    Raises:
        UserError: there are none.
    """
    if not isinstance(image, str):
        listed = tuple(Path(str(one)).expanduser() for one in image)
        if lost := [one for one in listed if not one.is_file() or not is_image(one.name)]:
            raise UserError(
                f"{setting}=[...]: {lost[0]} is not an image file. A list names the references of one edit. For "
                'several edits give a folder or a glob, as "folder/*.jpg".'
            )
        return [listed]
    path = Path(image).expanduser()
    if path.is_file() and not is_image(path.name):
        raise UserError(f"{setting}={image}: the file is not one of {IMAGE_FORMATS}")
    pattern = f"{glob.escape(str(path))}/*" if path.is_dir() else str(path)
    found = [path] if path.is_file() else [Path(name) for name in glob.glob(pattern, recursive=True)]
    read = (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES)
    left_out = [one for one in found if one.is_file() and one.suffix.lower() not in read and not is_clutter(one.name)]
    others = Counter(f"*{one.suffix}" for one in left_out)
    unread = f"{listing([f'{kind} ({count})' for kind, count in others.items()])}: not one of {IMAGE_FORMATS}"
    edits = []
    for folder, names in itertools.groupby(sorted(one for one in found if is_image(one.name)), lambda one: one.parent):
        beside = {stem_of(one): one for one in folder.iterdir() if is_image(one.name)}
        further = further_controls(beside)
        edits += [
            (one, *further.get(stem_of(one), []))
            for one in names
            if path.is_file() or not belongs_to_another(stem_of(one), beside)
        ]
    if not edits:
        what = unread if others else "no image in it" if found or path.is_dir() else "no such file or folder"
        raise UserError(f"{setting}={image}: {what}")
    if others:
        log.warning(f"note: {setting}={image}: left out {unread}")
    return edits


def _read_prompts(prompt: str | Sequence[str] | None, prompts_file: str | None, required: bool) -> list[str]:
    if prompt in (None, []) and prompts_file is None:
        if not required:
            return []
        raise UserError('no instruction: give prompt="make it snow", or prompts_file=FILE with one prompt a line')
    if prompt is not None and prompts_file is not None:
        raise UserError("both prompt= and prompts_file= are given: choose one")
    if prompt is not None:
        return [prompt] if isinstance(prompt, str) else list(prompt)
    path = Path(str(prompts_file)).expanduser()
    try:
        prompts = text_prompts(read_text(path, TABLE))
    except UserError as error:
        raise UserError(f"prompts_file={str(error).removeprefix('cannot read ')}") from error
    if not any(prompts):
        raise UserError(f"prompts_file={path}: the file is empty")
    return list(prompts)
