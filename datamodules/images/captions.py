"""Captions of an image: one or several, in files next to it or in the columns of a table."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from datamodules.images.samples import CAPTION_SUFFIXES
from foundation.errors import UserError
from foundation.files import TEXT, decoded

# Keys of a JSON object that hold captions.
CAPTION_KEYS = ("captions", "caption", "prompt")
# YAML between `---`, or TOML between `+++`, before the text of a file.
_FRONT_MATTER = re.compile(
    r"""\A\s*(---|\+\+\+)[ \t]*\n(?=(\s*+\#.*+\n)*+\s*+["']?[\w -]++["']?[ \t]*+[:=])"""
    r"""(?s:.)*?^(\1|\.\.\.)[ \t]*(\n|\Z)""",
    re.M,
)

# The start of a model's answer that is no caption: reasoning without an end, a refusal, words to the person who asked.
_REPLY = re.compile(
    r"""\W*(<?/?(think|thought|reason|analysis|scratchpad)\w*>
    |(i\ ?'?a?m\ )?(so\ |very\ )?(sorry\b|unable\ to|not\ able\ to)|i\ apologi[sz]e|my\ apologies|unfortunately\s*,
    |as\ an?\ (ai|artificial|large\ language|language\ model|virtual)\b
    |i\ (can('?t|\ ?not)|could(n't|\ not)|won't|will\ not|do(n't|\ not)\ (see|have|feel))\b
    |(sure|certainly|of\ course|absolutely|okay|ok|alright|got\ it)(\ thing)?\s*[!,.:\u2014]
    |here(\ is|'s|\ are)\ (the|a|an|your|one|my)\ ([\w-]+\ ){0,3}(instruction|caption|prompt|description|answer)
    |(okay\ |so\ |now\ |first\ )*(let's|let\ me|i\ need\ to|i\ will|i'll|the\ user)\b)""",
    re.I | re.X,
)


def is_reply(caption: str) -> bool:
    """Return whether a text is a model's reply to a person, such as a refusal, and not a caption."""
    return _REPLY.match(caption.replace("\u2019", "'")) is not None


def read_captions(contents: Mapping[str, Any], per_line: bool = True) -> tuple[tuple[str, ...], str | None]:
    """Return the captions of an image and the name of the file that holds them; () and None if no file does.

    Args:
        contents: content of X.txt, X.caption and X.json by file name, as `parsed`; any may be missing.
        per_line: treat each line of a text as a caption.

    Raises:
        UserError: the only file holds no captions, or two files differ.
    """
    found: dict[str, tuple[str, ...]] = {}
    for suffix in CAPTION_SUFFIXES:
        for name, content in contents.items():
            if name.lower().endswith(suffix):
                prompts = (
                    _json_prompts(content, name, not found) if suffix == ".json" else text_prompts(content, per_line)
                )
                found |= {name: prompts} if prompts else {}
    if len({tuple(" ".join(prompts).split()) for prompts in found.values()}) > 1:
        raise UserError(f"{' and '.join(found)} hold different captions of one image. Keep one")
    return next(((prompts, name) for name, prompts in found.items()), ((), None))


def text_prompts(text: str, per_line: bool = True) -> tuple[str, ...]:
    """Return each non-empty line, or the whole text if it is a JSON object or array; ("",) for an empty text.

    Lines end as on Unix, Windows and old Macs, not at other separators of Unicode. Front matter is left out.
    """
    with suppress(ValueError, RecursionError):
        per_line = per_line and not isinstance(json.loads(text), dict | list)
    text = _FRONT_MATTER.sub("", re.sub("\r\n?", "\n", text))
    lines = text.split("\n")
    return _stripped(lines if per_line else ["\n".join(lines)])


def parsed(text: str, name: str) -> Any:
    """Return a text as it is, and the content of a JSON file; raises a UserError if it is malformed."""
    try:
        return json.loads(text) if name.lower().endswith(".json") else text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {getattr(error, 'msg', error)}") from error


def readable(caption: str | bytes, name: str) -> bytes:
    """Return a caption's file that is to be written: its content, or a text; raise a UserError if a scan refuses it."""
    content = caption if isinstance(caption, bytes) else f"{caption}\n".encode(errors="surrogatepass")
    if len(content) > TEXT:
        raise UserError(f"{name}: a caption has at most {TEXT:,} bytes. Shorten it.")
    read_captions({name: parsed(decoded(content, name), name)})
    return content


def _json_prompts(value: Any, name: str, alone: bool) -> tuple[str, ...]:
    """Return the captions of a JSON file; () if it contains none, and is not `alone`.

    Raises:
        UserError: it holds no captions.
    """
    if isinstance(value, dict):
        value = next((value[key] for key in CAPTION_KEYS if value.get(key) is not None), None)
    prompts = None if value is None else captions_of(value)
    if prompts is None and alone:
        raise UserError(
            f"{name}: captions must be a text, a list of texts, or an object with one of {', '.join(CAPTION_KEYS)}; "
            f"a prompt that is itself JSON is written in {Path(name).stem}.txt"
        )
    return prompts or ()


def captions_of(value: Any) -> tuple[str, ...] | None:
    """Return the captions in a value: a text, an object (one caption in JSON), or a list of them; None if neither."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | dict) for one in values):
        return None
    return _stripped([one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values])


def _stripped(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip()) or ("",)


def wrapped_line(captions: Sequence[str]) -> str | None:
    """Return the first caption that ends in the middle of a sentence, which the next one continues."""
    prose = any(caption[:1].isupper() or caption.endswith((".", "!", "?")) for caption in captions)
    for one, following in itertools.pairwise(captions):
        unfinished = one[-1:] == "," or (prose and (one[-1:].isalnum() or one.endswith(("-", ";"))))
        if unfinished and following[:1].islower():
            return one
    return None
