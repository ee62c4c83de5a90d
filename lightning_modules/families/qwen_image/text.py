"""Prompts as diffusers' Qwen pipelines see them: their own templates, and images between the words."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_modules.family import Parts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def _pipeline(pipeline_class: "type[DiffusionPipeline]", **parts: Any) -> Any:
    without = dict.fromkeys(("scheduler", "vae", "transformer", "text_encoder"))
    return pipeline_class(**(without | parts))


def embeddings(
    pipeline_class: "type[DiffusionPipeline]", parts: Parts, names: tuple[str, ...], prompt: str, images: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """(L, D) of a prompt and its mask (L,).

    Args:
        names: the parts that encode text.
    """
    # The language model without its head, whose logits nobody needs.
    used = {name: parts[name] for name in names} | {"text_encoder": parts["text_encoder"].model}
    pipeline = _pipeline(pipeline_class, **used)
    seen = {"image": images} if images else {}
    device = parts.device("text_encoder")
    embeds, mask = pipeline._get_qwen_prompt_embeds(prompt, **seen, device=device, dtype=parts.dtype)
    return embeds[0], mask[0]


def token_counts(pipeline_class: "type[DiffusionPipeline]", tokenizer: Any, prompts: list[str]) -> list[int]:
    """How many embeddings each prompt has, where no image is seen with it."""
    pipeline = _pipeline(pipeline_class, tokenizer=tokenizer)
    chats = [pipeline.prompt_template_encode.format(prompt) for prompt in prompts]
    return [len(ids) - pipeline.prompt_template_encode_start_idx for ids in tokenizer(chats).input_ids]
