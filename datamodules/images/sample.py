"""What a source of samples gives: samples, whose pictures are files or stand inside of larger files."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing, printable
from datamodules.files import Packed, file_signature

# Where the bytes of a picture are.
Picture = Path | Packed


@dataclass(frozen=True)
class Alpha(Packed):
    """The alpha channel of a picture, as a mask: 1 where it is opaque."""

    picture: Picture

    def read(self) -> bytes:
        return self.picture.read_bytes() if isinstance(self.picture, Path) else self.picture.read()

    def signature(self) -> tuple[str, int, int, int]:
        name, size, modified, changed = file_signature(self.picture)
        return f"{name}#alpha", size, modified, changed

    @property
    def stem(self) -> str:
        return self.picture.stem

    def __str__(self) -> str:
        return str(self.picture)


# What the settings of single forms are about.
FORMS = {"columns": "tables, data sets and tars, which have columns", "pair_suffixes": "pairs in one folder"}


def place(picture: Picture) -> Picture:
    """One name for all names of a picture."""
    return picture.resolve() if isinstance(picture, Path) else picture


@dataclass(frozen=True)
class Root:
    """One of data.root, with the settings of its samples; those that it does not set are data's.

    Attributes:
        path: a folder, a table, `hf://owner/name`, ...
        repeats: how often an epoch has each of its samples.
        weight: of its samples in the loss.
        resolution: sides of the squares whose areas its pictures are shrunk to, each sample to each; empty for its own
            size.
        prefix: stands before its captions.
        trigger_word: replaces [trigger] in its captions, and stands before those that have neither.
        columns: for tables, which of their columns is what.
        pair_suffixes: how the file names of the controls and the targets of one folder end.
        caption_per_line: whether each line of a text file is a caption, else the whole file is one.
        alpha_mask: whether the alpha channels of its targets are the masks of their losses.
        require_prompt: whether a sample without caption is incomplete, or is one with no prompts; no setting.
    """

    path: str | Path
    repeats: int = 1
    weight: float = 1.0
    resolution: tuple[int, ...] = ()
    prefix: str = ""
    trigger_word: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    pair_suffixes: tuple[str, str] | None = None
    caption_per_line: bool = True
    alpha_mask: bool = False
    require_prompt: bool = True

    def __str__(self) -> str:
        """Its path, with what makes its samples count more or less than those of others."""
        counts = [f"repeats {self.repeats}"] if self.repeats != 1 else []
        counts += [f"weight {self.weight:g}"] if self.weight != 1 else []
        return f"{self.path} ({', '.join(counts)})" if counts else str(self.path)


@dataclass(frozen=True)
class Sample:
    """The pictures and the captions of one sample.

    Attributes:
        key: the target's path in its root without suffix; unique over all roots, in valid UTF-8.
        target: the picture to learn.
        controls: the condition images to start from.
        prompts: instructions or captions, at least one where its root requires it; each time one of them is drawn.
        mask: the weight of each pixel in the loss.
        rejected: of the target's size, what is to be liked less than it; only preferences are learned from it.
        root: the number of its root.
        caption_file: a text file of its own, where its prompts stand or would; None where they stand in a table.
    """

    key: str
    target: Picture
    controls: tuple[Picture, ...]
    prompts: tuple[str, ...]
    mask: Picture | None = None
    rejected: Picture | None = None
    root: int = 0
    caption_file: Path | None = None


@dataclass(frozen=True)
class Found:
    """The result of a scan: the complete samples, and a line about each incomplete one.

    Attributes:
        passed_over: how many files that are no pictures of anybody (hidden, Thumbs.db, __MACOSX) were left out.
        forms: of each root, the setting that its form needs to know more: `columns`, `pair_suffixes`, or none.
        notes: a line about each thing that was found and not read.
    """

    samples: list[Sample]
    incomplete: list[str]
    passed_over: int = 0
    forms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Finds the samples of some roots.
Source = Callable[[list[Root]], Found]


def scan_roots(roots: Iterable[Root], scan: Callable[[Root], Found]) -> Found:
    """What `scan` finds in all roots, with keys that are unique over them."""
    roots = list(roots)
    samples: list[Sample] = []
    incomplete: list[str] = []
    passed_over = 0
    forms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: Counter[str] = Counter()
    for number, root in enumerate(roots):
        found = scan(root)
        prefix = "" if len(roots) == 1 else f"{root.path}/"
        for sample in found.samples:
            key = printable(prefix + sample.key)
            seen[key] += 1  # above 1 if a root is named twice
            samples.append(replace(sample, key=key if seen[key] == 1 else f"{key}#{seen[key]}", root=number))
        incomplete += map(printable, found.incomplete)
        passed_over += found.passed_over
        forms += found.forms or ("",)
        notes += tuple(map(printable, found.notes))
    return Found(samples, incomplete, passed_over, forms, notes)


def refuse_unused(roots: Sequence[Root], forms: Sequence[str]) -> None:
    """Raise a UserError where no root has the form that data.columns or data.pair_suffixes is about.

    What is set for all roots is used by those of its form; what one has for itself has to be of its form.

    Args:
        forms: of each root, as in `Found`.
    """
    for setting, what in FORMS.items():
        given = [(getattr(root, setting), root.path, form) for root, form in zip(roots, forms, strict=False)]
        for value in [value for value, *_ in given if value]:
            those = [(path, form) for other, path, form in given if other == value]
            if all(form != setting for _, form in those):
                text = f"[{','.join(value)}]" if isinstance(value, tuple) else dict(value)
                paths = listing([str(path) for path, _ in those])
                raise UserError(f"data.{setting}={text} is for {what}, and {paths} has none: leave it out")
