"""LongCat's prompts: their tokens and embeddings, as its pipeline has them, but for those that are too long."""

from typing import Any

import torch
from torch import Tensor

MAX_TOKENS = 512  # the pipeline's; it fails for more, where it means to cut


def tokenize(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt alone; what stands in quotes, to be written in the picture, letter by letter."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import split_quotation

    pieces = [piece for text, quoted in split_quotation(prompt) for piece in (text if quoted else [text])]
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False).input_ids]


@torch.no_grad()
def embed(pipeline: Any, tokens: list[int], images: list[Tensor], device: torch.device) -> Tensor:
    """The last hidden states (L, D) of the images and of MAX_TOKENS of text, padding included.

    Args:
        pipeline: with tokenizer, processor and a text encoder without its head.
        images: each (3, h, w) in 8 bits.
    """
    tokenizer = pipeline.tokenizer
    seen = pipeline.image_processor_vl(images=images, return_tensors="pt").to(device)
    padded = tokenizer.pad(
        {"input_ids": [tokens[:MAX_TOKENS]]}, max_length=MAX_TOKENS, padding="max_length", return_tensors="pt"
    )
    count = int(seen.image_grid_thw.prod()) // pipeline.image_processor_vl.merge_size**2
    template = pipeline.prompt_template_encode_prefix.replace(pipeline.image_token, pipeline.image_token * count)
    before, after = (
        tokenizer(text, add_special_tokens=False, return_tensors="pt")
        for text in (template, pipeline.prompt_template_encode_suffix)
    )
    parts = before, padded, after
    states = pipeline.text_encoder(
        input_ids=torch.cat([part.input_ids for part in parts], dim=1).to(device),
        attention_mask=torch.cat([part.attention_mask for part in parts], dim=1).to(device),
        output_hidden_states=True,
        **seen,
    ).hidden_states[-1][0]
    start = before.input_ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|vision_start|>"))
    return states[start : -after.input_ids.shape[1]]
