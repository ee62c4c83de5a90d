"""Bases that were distilled to few steps: how they are known, and what training straight on them costs."""

import re
from pathlib import Path

from lightning_modules.pretrained.frozen_base import FrozenBase, note_once

# Words by which distilled checkpoints are called, as in Z-Image-Turbo, FLUX.1-schnell and Qwen-Image-Lightning.
CALLED = re.compile(r"(?<![a-z])(turbo|schnell|lightning|distilled)(?![a-z])", re.IGNORECASE)


def name_of_transformer(base: FrozenBase) -> str:
    """Of the repository that it comes from, as the settings give it."""
    return base.name if base.source.repository == base.components.repository else base.source.name


def sign_of_distillation(base: FrozenBase) -> str | None:
    """What says that the transformer of a base was distilled to few steps, in words; None where nothing does.

    FLUX.1 [dev], whose guidance was distilled and not its steps, says nothing.
    """
    source = base.source
    config, index = source.config(), source.pipeline_index()
    names = [name_of_transformer(base), index.get("_name_or_path")]
    if not index:  # a transformer alone is most often one of the base's kind
        index = base.index
        names += [base.name, index.get("_name_or_path")]
    if index.get("is_distilled") is True:
        return "is_distilled in model_index.json"
    for key in ("is_distilled", "flow_map"):
        if config.get(key) is True:
            return f"{key} in the transformer's config.json"
    for name in names:
        if isinstance(name, str) and (found := CALLED.search(Path(name).name)):
            return f"{found[1]} in its name"
    return None


def note_distilled(base: FrozenBase) -> None:
    """Say what training straight on a distilled base costs, and what to do instead; once, and nothing of others."""
    if sign := sign_of_distillation(base):
        note_once(
            f"{name_of_transformer(base)} is distilled to few steps ({sign}): a LoRA trained straight on it loses "
            "that, and pictures of few steps turn blurry or grey. Train on the base checkpoint, with "
            "model.sampling.transformer_name_or_path for pictures by this one; or train on this one with a LoRA that "
            "undoes the distillation, model.training_adapter. Either way model.sampling needs its steps and scales: "
            "docs/training.md, distilled bases"
        )
