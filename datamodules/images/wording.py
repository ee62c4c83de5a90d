"""What may be wrong with captions."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from datamodules.errors import listing
from datamodules.images.findings import Finding, Kind
from datamodules.images.sample import Picture, Sample

# Share of the samples that must have captions of their own before a repeated one is a mistake: else it is the edit's.
VARIED = 0.8
# Shorter captions are instructions ("make it snow"), which may be right for several pictures; a description is not.
LEAST_WORDS = 6
# Captions that are counted at once.
AT_ONCE = 1000


def caption_findings(samples: Sequence[Sample]) -> list[Finding]:
    """Captions that are empty, unless all are, or lack letters, and descriptions that a few of many pictures share."""
    found = [
        Finding(Kind.NO_CAPTION, sample.key, "no words", sample)
        for sample in samples
        if not all(prompt.strip() for prompt in sample.prompts)
    ]
    if samples and len(found) == len(samples):
        found = [Finding(Kind.NO_CAPTION, f"all {len(samples)}", "no words")]
    found += [
        Finding(Kind.NO_LETTERS, sample.key, listing(bare), sample)
        for sample in samples
        if (bare := [prompt for prompt in sample.prompts if prompt.strip() and not any(map(str.isalpha, prompt))])
    ]
    owners: dict[str, dict[Picture, Sample]] = defaultdict(dict)
    for sample in samples:
        for prompt in sample.prompts:
            owners[prompt.strip()].setdefault(sample.target, sample)
    own = sum(len(owned) == 1 for owned in owners.values())
    targets = len({sample.target for sample in samples})
    for prompt, owned in owners.items():
        if len(owned) > 1 and own >= VARIED * targets and len(prompt.split()) >= LEAST_WORDS:
            first, *others = owned.values()
            found += [Finding(Kind.REPEATED_CAPTION, one.key, f"as {first.key}", one, first) for one in others]
    return found


def long_captions(
    samples: Iterable[Sample], count: Callable[[list[str]], tuple[list[int], int] | None]
) -> list[Finding]:
    """Captions of more tokens than the text encoder reads.

    Args:
        count: the tokens of each of some captions, and how many are read; None for all.
    """
    by_prompt = {prompt: sample for sample in samples for prompt in sample.prompts}
    prompts = list(by_prompt)
    found = []
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        if (counted := count(some)) is None:
            break
        tokens_of, limit = counted
        for prompt, tokens in zip(some, tokens_of, strict=True):
            if tokens > limit:
                sample = by_prompt[prompt]
                found.append(Finding(Kind.LONG_CAPTION, sample.key, f"{tokens} tokens, {limit} are read", sample))
    return found
