"""Krea 2's parts of the training loss and its images, as in references.py."""

import math
from typing import Any

import torch

from tests.support.krea2_editing import AREA, CONDITION, LENGTH, EditingKrea2
from tests.support.references import GUIDED, Qwen


class Krea2(Qwen):
    """Krea 2, text to image, by its stock pipeline."""

    def embeddings(self, stock, prompt, images):
        embeds, mask = stock.encode_prompt(prompt, max_sequence_length=LENGTH)
        return {"prompt_embeds": embeds[mask], "prompt_embeds_mask": torch.ones(int(mask.sum()))}

    def arguments(self, images):
        return {}

    def velocity(self, stock, x_t, t, images, prompt):
        embeds, mask = stock.encode_prompt(prompt, max_sequence_length=LENGTH)
        height, width = (side // 2 for side in x_t.shape[-2:])
        return stock.transformer(
            hidden_states=self.pack(stock, x_t),
            timestep=t,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            position_ids=stock.prepare_position_ids(embeds.shape[1], height, width, torch.device("cpu")),
        ).sample


class Krea2Edit(Krea2):
    """Krea 2 with references; without any it must be the stock pipeline's."""

    def stock(self, repository, monkeypatch, **how):
        scheme = "before" if any("before" in one for one in self.settings) else "after"
        return EditingKrea2.of(super().stock(repository, monkeypatch, **how), scheme)

    def arguments(self, images):
        return {"image": images}

    def embeddings(self, stock, prompt, images):
        [embeds] = stock.text(prompt, images)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(len(embeds))}

    def velocity(self, stock, x_t, t, images, prompt):
        if not images:
            return super().velocity(stock, x_t, t, images, prompt)
        sides = x_t.shape[-2] // 2, x_t.shape[-1] // 2
        return stock.velocity(self.pack(stock, x_t), sides, t, prompt, images)


SETTINGS = (f"model.max_sequence_length={LENGTH}",)
EDIT = (*SETTINGS, f"model.resolution={math.isqrt(AREA)}", f"model.condition_image_size={CONDITION}")
SHARED: dict[str, Any] = {"guided": GUIDED, "unguided": {"guidance_scale": 0.0}, "length": LENGTH}
# By name of the YAML, and of the scheme if it is not the YAML's.
KREA2_REFERENCES = {
    "krea2": Krea2("krea2", SETTINGS, {"max_sequence_length": LENGTH}, **SHARED),
    "krea2_edit": Krea2Edit("krea2_edit", EDIT, **SHARED),
    "krea2_edit, before": Krea2Edit("krea2_edit", (*EDIT, "model.edit_scheme=before"), **SHARED),
}
