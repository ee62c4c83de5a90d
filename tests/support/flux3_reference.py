"""FLUX.3's parts of the training loss and its images, as in references.py."""

import torch
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from tests.support.references import GUIDED, Flux2


class Flux3(Flux2):
    """FLUX.3, whose references are tokens of their own."""

    def stock(self, repository, monkeypatch, **how):
        stock = super().stock(repository, monkeypatch, **how)
        stock._patchify_latents = Flux3VaeEncoderStep._patchify_latents
        return stock

    def shift(self, stock, latents):
        return 1.0

    def arguments(self, images):
        return {"image": images} if images else {}

    def embeddings(self, stock, prompt, images):
        embed = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        return {"prompt_embeds": embed(stock.text_encoder, stock.tokenizer, prompt)[0]}

    def pack(self, stock, latents):
        return latents.flatten(2).transpose(1, 2)

    def controls(self, stock, images, dtype=torch.float32):
        """Return the normalized latents of references, with a channel for each of a token's values."""
        steps = stock.blocks.sub_blocks["vae_encoder"]
        state = PipelineState()
        state.set("image", images)
        return steps(stock.pipeline, state)[1].get("image_cond_latents")

    def velocity(self, stock, x_t, t, images, prompt):
        embeds = self.embeddings(stock, prompt, images)["prompt_embeds"][None]
        references = {}
        if images:
            latents = self.controls(stock, images)
            ids = [_prepare_image_ids(*one.shape[-2:], 0.5, -1 - index) for index, one in enumerate(latents)]
            tokens = torch.cat([self.pack(stock, one) for one in latents], 1)
            references = {"image_cond_hidden_states": tokens, "image_cond_ids": torch.cat(ids)}
        return stock.transformer(
            hidden_states=self.pack(stock, x_t),
            timestep=t,
            encoder_hidden_states=embeds,
            txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(embeds),
            img_ids=_prepare_image_ids(*x_t.shape[-2:], 0.5),
            **references,
        ).sample


FLUX3_REFERENCE = Flux3("flux3_klein", guided=GUIDED, unguided={"guidance_scale": 1.0}, length=8192)
