"""What a LoRA file says of itself, and how text from a file is shown."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from datamodules.errors import printable
from lightning_modules.adapters.formats.lora_file import DIFFUSERS_KEY, HEADER_KEY

# Of a text from a file, in the terminal.
LETTERS = 70
# Of a path.
PATH = 48
# The settings of the model, of which `base` is the one that counts, and the schedule, which has a row.
SAID_ELSEWHERE = ("model.pre", "model.max_non", "model.sampling", "adapter.rank_schedule")
# Entries that are JSON of many.
OWN = (HEADER_KEY, DIFFUSERS_KEY)
# Of a header's text that is looked into.
LONGEST = 100_000
# What comes first of ours, kohya's, diffusers' and others' entries.
FIRST = (
    "base",
    "model.name",
    "step",
    "adapter.rank",
    "adapter.alpha",
    "adapter.target_modules",
    "ss_base_model_version",
    "ss_sd_model_name",
    "ss_output_name",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_learning_rate",
    "ss_optimizer",
    "ss_steps",
    "ss_num_train_images",
    "modelspec.title",
    "modelspec.architecture",
    "transformer.r",
    "transformer.lora_alpha",
    "transformer.target_modules",
    "software.name",
    "training_info.step",
)


def shown(text: Any, most: int = LETTERS) -> str:
    """What a file says, as a part of one line: cut off, and without what moves a cursor or turns the text round."""
    start = printable(str(text)[: most + 1])  # of megabytes
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def end_of(text: str, most: int) -> str:
    """The end of a path, which tells more than its beginning."""
    return shown(text if len(text) <= most else f"...{text[3 - most :]}", most)


def entries(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a header says, by names, the most telling first."""
    said = {name: value for key, text in metadata.items() for name, value in _entries(key, text)}
    return {key: said[key] for key in dict.fromkeys([*FIRST, *said]) if key in said}


def _entries(key: str, text: str) -> Iterator[tuple[str, str]]:
    """A header's entry, or those of the JSON that it is."""
    found = [(key, text)]
    if len(text) <= LONGEST and text[:1] in "{[":
        try:
            value = json.loads(text)
            if isinstance(value, dict):
                found = [
                    (name, str(one)) for name, one in (_flat("", value, 2) if key in OWN else _flat(key, value, 1))
                ]
        except (ValueError, RecursionError):
            pass  # it is shown as it stands there
    for name, value in found:
        if name.startswith(SAID_ELSEWHERE):
            continue
        if value not in ("", "None", "null", "[]", "{}"):
            yield name, end_of(value, PATH) if value.startswith("/") else shown(value)


def _flat(start: str, value: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        name = f"{start}.{key}" if start else key
        if isinstance(one, dict) and depth > 1:
            yield from _flat(name, one, depth - 1)
        else:
            yield name, one
