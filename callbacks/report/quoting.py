"""Values on the command line that Hydra must not parse: which settings they are, and which of them mean more."""

from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

TEXTS = {
    "prompt",
    "negative_prompt",
    "model.sampling.negative_prompt",
    "data.prefix",
    "data.source.instance_prompt",
    "data.trigger_word",
    "captioner.pair.system",
    "captioner.pair.user",
    "captioner.single.system",
    "captioner.single.user",
}
PATHS = {
    "image",
    "prompts_file",
    "lora",
    "merge",
    "output_dir",
    "ckpt_path",
    "data.cache_dir",
    "data.root",
    "data.shards",
    "data.val_root",
    "adapter.init_from",
    "captioner.pretrained_model_name_or_path",
    "model.pretrained_model_name_or_path",
    "model.transformer_name_or_path",
    "model.sampling.transformer_name_or_path",
    "sample_root",
}


def has_a_meaning(key: str, value: str) -> bool:
    """Whether a value is more than its letters: quoted text, a list, null, or a path that may be a sweep over two."""
    quoted = len(value) > 1 and value[0] + value[-1] in ("''", '""', "[]")
    several = key in PATHS and "," in value and not Path(value).exists()
    return quoted or several or value in ("", "null")


def literal(value: str) -> str:
    """A value as Hydra reads it back letter for letter."""
    return QuotedString(value.replace("${", "\\${"), Quote.double).with_quotes()
