"""A vision-language model that writes captions."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image

from datamodules.images.captions import is_reply
from datamodules.images.decoding import floor_size, shrunk
from foundation.errors import UserError, listing
from foundation.files import reading, reason
from foundation.hub import repository_file
from lightning_modules.pretrained.checks import check_component, read_json
from lightning_modules.pretrained.component_files import open_component
from lightning_modules.pretrained.repository import resolve_device, resolve_dtype, resolve_repository
from lightning_modules.pretrained.weights import GET_AGAIN
from lightning_modules.quantization.quantization import Quantization

if TYPE_CHECKING:
    from transformers import BatchFeature

# Placeholder of images in a template.
PLACE = re.compile(r"\{(\w+)\}")
ANSWER_LABEL = re.compile(r"^(the )?(edit(ing)? )?(instruction|caption|prompt|description|answer)\s*:\s*", re.I)
QUOTATION_MARKS = {'"': '"', "'": "'", "“": "”", "\u2018": "\u2019", "«": "»", "`": "`", "*": "*", "_": "_"}


class Answer(NamedTuple):
    """A caption, and whether it is cut off at max_new_tokens."""

    text: str
    cut: bool


def cleaned(answer: str) -> str:
    """Return an answer as one line, without its reasoning, a label (`Instruction:`), bold, and quotes around it.

    Empty if it is no caption: reasoning that does not end, a refusal, or words to the person who asked.
    """
    text = ANSWER_LABEL.sub("", " ".join(answer.rpartition("</think>")[2].replace("**", "").split()))
    end = QUOTATION_MARKS.get(text[:1])
    # '"A" becomes "B"' keeps its quotes.
    if end and len(text) > 1 and text.endswith(end) and not {text[0], end} & set(text[1:-1]):
        text = text[1:-1]
    return "" if is_reply(text) else text.strip()


class Captioner:
    """A vision-language model of transformers and its prompts. `load` reads the weights.

    Answers are greedy: to rounding, they do not depend on the other samples of a batch.

    Args:
        pretrained_model_name_or_path: folder or hub id of an image-text-to-text model with its processor.
        revision: revision of a hub repository.
        dtype: dtype of parts that are not quantized, `float32` or `bfloat16`.
        device: device of the model; None for the trainer's.
        quantization: quantization of its linear layers; None for none.
        max_new_tokens: largest length of an answer.
        max_area: larger images are shrunk to this many pixels.
        batch_size: samples per batch.
        pair, single: the `system` and `user` texts for images with condition images and without; `{controls}` and
            `{target}` in the user's text stand for images.

    Raises:
        UserError: a text lacks a placeholder, or has an unknown one.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        revision: str | None,
        dtype: str,
        device: str | None,
        quantization: Quantization | None,
        max_new_tokens: int,
        max_area: int,
        batch_size: int,
        pair: Mapping[str, str],
        single: Mapping[str, str],
    ) -> None:
        self.name = resolve_repository(pretrained_model_name_or_path)
        self.revision = revision
        self.dtype = resolve_dtype(dtype, "captioner.dtype")
        self.device = resolve_device(device, "captioner.device")
        self.quantization = quantization
        self.max_new_tokens = max_new_tokens
        self.max_area = max_area
        self.batch_size = batch_size
        self.pair, self.single = pair, single
        for key, template, places in (("pair", pair, ["controls", "target"]), ("single", single, ["target"])):
            user = template.get("user") if isinstance(template, Mapping) else None
            if not isinstance(user, str) or sorted(PLACE.findall(user)) != places:
                wanted = " and ".join(f"{{{place}}}" for place in places)
                raise UserError(f"captioner.{key}.user={user}: must be a text with {wanted} once, and no other braces")

    def check_repository(self) -> None:
        """Check the repository before any weights are read.

        Raises:
            UserError: it cannot be reached, lacks a file, or holds no image-text-to-text model.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KNOWN

        path = repository_file(self.name, "config.json", self.revision)
        if path is None:
            raise UserError(f"{self.name} lacks config.json: it is not a model of transformers")
        kind = read_json(path).get("model_type")
        if kind not in KNOWN:
            raise UserError(
                f"{self.name} holds a model of type {kind}, which does not answer to images: captioner=qwen3_vl and "
                "qwen2_5_vl do"
            )
        if Path(self.name).is_dir():
            for class_name in ("Model", "Processor"):
                check_component(Path(self.name), class_name)

    def load(self, device: Callable[[], torch.device]) -> None:
        """Load processor and model to the configured device, or else to the one that `device` returns."""
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

        with reading(f"the processor or configuration of {self.name}", GET_AGAIN):
            trusted = {"revision": self.revision, "trust_remote_code": False}  # the default asks at the terminal
            self.processor = AutoProcessor.from_pretrained(self.name, **trusted)
            config = AutoConfig.from_pretrained(self.name, **trusted)
            with init_empty_weights():
                empty = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
                empty.requires_grad_(False)
            if repository_file(self.name, "generation_config.json", self.revision):
                empty.generation_config = GenerationConfig.from_pretrained(self.name, revision=self.revision)
        if not getattr(self.processor, "chat_template", None):
            raise UserError(f"{self.name} lacks a chat template: choose a model that was made for instructions")
        place = self.device or device()
        weights = open_component(empty, self.name, revision=self.revision)
        try:
            self.model = weights.load(place, self.dtype, self.quantization)
        except torch.OutOfMemoryError as error:
            raise UserError(f"no room for {self.name} on {place}: pass captioner/quantization=nf4") from error
        self.model.generation_config.update(do_sample=False, temperature=None, top_p=None, top_k=None)

    def shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Return the size at which the model sees an image."""
        return floor_size(*shrunk(width, height, self.max_area))

    def prepare(self, samples: Sequence[tuple[Sequence[Image.Image], Image.Image]]) -> "BatchFeature":
        """Return the model's inputs for the controls and target of samples, whose sizes must be equal.

        Raises:
            UserError: the processor does not take images of this size.
        """
        conversations = [self._conversation(*sample) for sample in samples]
        try:
            return self.processor.apply_chat_template(
                conversations,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                # Samples of one size have one length: there is no padding that could change answers.
                processor_kwargs={"padding": True, "padding_side": "left"},
            )
        except ValueError as error:
            sizes = [f"{one.width}x{one.height}" for one in (*samples[0][0], samples[0][1])]
            raise UserError(f"{self.name} takes no images of {listing(sizes)}: {reason(error)}") from error

    def _conversation(self, controls: Sequence[Image.Image], target: Image.Image) -> list[dict[str, Any]]:
        template = self.pair if controls else self.single
        images = {"controls": controls, "target": [target]}
        content: list[dict[str, Any]] = []
        for index, part in enumerate(PLACE.split(template["user"])):
            if index % 2:
                content += [{"type": "image", "image": image} for image in images[part]]
            elif part.strip():
                content.append({"type": "text", "text": part})
        user = {"role": "user", "content": content}
        if not template.get("system"):  # some models have no such role
            return [user]
        return [{"role": "system", "content": [{"type": "text", "text": template["system"]}]}, user]

    @torch.inference_mode()
    def __call__(self, inputs: "BatchFeature") -> list[Answer]:
        """Return the answers to prepared inputs, cleaned."""
        inputs = inputs.to(self.model.device, self.dtype)
        try:
            tokens = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens)
        except torch.OutOfMemoryError as error:
            raise UserError(
                "out of GPU memory: lower captioner.batch_size or captioner.max_area, or pass "
                "captioner/quantization=nf4"
            ) from error
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        ends = torch.tensor(self.model.generation_config.eos_token_id or [], device=answers.device)
        ended = torch.isin(answers, ends).any(1).tolist()
        texts = self.processor.batch_decode(answers, skip_special_tokens=True)
        return [Answer(cleaned(text), not end) for text, end in zip(texts, ended, strict=True)]
