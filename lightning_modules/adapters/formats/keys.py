"""How tensors are called in LoRA files."""

import re
from collections.abc import Iterable, Mapping, Sequence

from datamodules.errors import listing, printable

# How the parts of a layer end. peft has the name of the adapter in them, as long as it is not saved by itself.
PARTS = {
    "down": re.compile(r"\.(?:lora_A(?:\.[^.]+)?|lora_down|lora\.down)\.weight$"),
    "up": re.compile(r"\.(?:lora_B(?:\.[^.]+)?|lora_up|lora\.up)\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
    "magnitude": re.compile(r"\.(?:lora_magnitude_vector(?:\.[^.]+){0,2}|dora_scale|magnitude)$"),
}
# Those of LyCORIS' and peft's other kinds have the names of `kinds.KINDS`.
FACTORS = re.compile(
    r"\.(lokr_w[12](?:_[ab])?|hada_w[12]_[ab]|oft_R(?=(?:\.default)?\.weight$))(?:\.default)?(?:\.weight)?$"
)
# x-flux: double_blocks.0.processor.qkv_lora1.down.weight
PROCESSORS = re.compile(r"(?<=_lora|lora[12])\.(down|up)\.weight$")
# What wraps modules in training: compiling, DDP, FSDP, DeepSpeed, checkpointing. It may stand anywhere in a name.
WRAPPERS = re.compile(
    r"(?:^|(?<=[._]))(?:_orig_mod[._]|(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|module)\.)"
)
TEXT_ENCODERS = "text encoders"
# What may be beside a LoRA's layers, and is left out with a note.
LEFT_OUT = {
    TEXT_ENCODERS: re.compile(
        r"(base_model\.model\.)?(lora_te\d*_|text_encoders?(_\d)?\.|te\d?\.|t5xxl\.|clip_[lg]\.)"
    ),
    "biases and norms": re.compile(r".*\.(diff_b|[wb]_norm)$|.*norm[^.]*\.(weight\.)?diff$"),
    "bookkeeping": re.compile(r"_aux\."),
}
# What files of other kinds have beside each layer, and what that is.
OTHER_KINDS = {
    "lokr_": "a LoKr of convolutions",
    "hada_": "a LoHa of convolutions",
    "oft_": "an OFT of another form",
    "lora_B.bias": "a LoRA with biases",
    "lora_mid": "a LoCon of convolutions",
    ".diff": "whole differences of weights",
    "_ia3": "IA3",
}


def divide(key: str) -> tuple[str, str | None]:
    """A tensor's name -> that of its layer, and which part it is; None for one that no LoRA has."""
    key = WRAPPERS.sub("", key)
    if found := PROCESSORS.search(key):
        return key[: found.start()], found[1]
    if found := FACTORS.search(key):
        return key[: found.start()], found[1]
    for part, end in PARTS.items():
        if found := end.search(key):
            return key[: found.start()], part
    return key, None


def left_out(key: str) -> str | None:
    """Return what a tensor is of that is left out, by `LEFT_OUT`; None for all others."""
    key = WRAPPERS.sub("", key)
    return next((what for what, names in LEFT_OUT.items() if names.match(key)), None)


def naming(key: str, prefixes: Mapping[str, str]) -> str:
    """Whose name of a tensor this is.

    Args:
        prefixes: the programs that have them.
    """
    if PROCESSORS.search(key):
        return "x-flux"
    return next((program for prefix, program in prefixes.items() if key.startswith(prefix)), "bare names")


def other_kind(keys: Iterable[str]) -> str | None:
    """What tensors are that Retouch does not read; None where it does not know."""
    return next((kind for part, kind in OTHER_KINDS.items() if any(part in key for key in keys)), None)


def short_key(name: str) -> str:
    """A file's name of something, which may be of any length and hold anything, as part of a line."""
    return printable(name if len(name) <= 100 else f"{name[:100]}...")


def some_keys(names: Sequence[str]) -> str:
    """Several of these."""
    return listing(list(map(short_key, names)))
