"""What task=caption leaves in output_dir: its captions as they are made, the page to review them, a table of them."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, count_of, printable
from datamodules.files import reading, replacing
from datamodules.images.decoding import open_image
from datamodules.images.samples import Sample
from report.images import data_url
from report.page import TEMPLATE

RECORDS, PAGE, TABLE = "captions.jsonl", "captions.html", "metadata.jsonl"
# Pixels of a picture's longer side on the page, and how many samples it shows: a browser holds them all in memory.
THUMBNAIL, SHOWN = 256, 1000


@dataclass(frozen=True)
class Proposal:
    """A caption that the model has written.

    Attributes:
        target, controls: the names of the pictures.
        file: where it was written; None where the samples come from a table.
        cut: whether the answer was longer than it may be.
    """

    key: str
    target: str
    controls: list[str]
    caption: str
    file: str | None
    cut: bool


class Proposals:
    """The captions in output_dir, those of an earlier command there included: it is gone on with.

    Each batch is in the file before anything else is done with it; a line that a killed process has cut is left out.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir
        self.path = output_dir / RECORDS
        self._known: dict[tuple[str, str], Proposal] = {}
        lines = []
        if self.path.is_file():
            with reading(self.path, "remove it, or choose another output_dir"):
                lines = self.path.read_text(encoding="utf-8").split("\n")
        for line in lines[:-1]:
            with reading(self.path, "remove it, or choose another output_dir"):
                self._add(Proposal(**json.loads(line)))
        self._mended = lines[-1:] in ([], [""])

    def __len__(self) -> int:
        return len(self._known)

    def _add(self, proposal: Proposal) -> None:
        self._known[proposal.target, proposal.key] = proposal

    def of(self, sample: Sample) -> Proposal | None:
        """What was written for a sample."""
        return self._known.get((str(sample.target), sample.key))

    def append(self, proposals: Sequence[Proposal]) -> None:
        """Add a batch's; they are on the disk when this returns."""
        if not self._mended:
            with replacing(self.path) as temporary:
                temporary.write_text("".join(map(_line, self._known.values())), encoding="utf-8")
            self._mended = True
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, proposals)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        for proposal in proposals:
            self._add(proposal)

    def write_page(self, lines: Iterable[str]) -> Path:
        """The page to review them: pictures, caption, and the file that holds it."""
        shown = list(self._known.values())[-SHOWN:]
        rest = len(self) - len(shown)
        more = [f"the last {len(shown)} of {len(self)}; all are in {RECORDS}"] if rest else []
        template = TEMPLATE.from_string(Path(__file__).with_name(PAGE).read_text(encoding="utf-8"))
        page = {"title": count_of(len(self), "captions"), "lines": [*lines, *more], "samples": _cards(shown)}
        with replacing(self.folder / PAGE) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(template.stream(page))
        return self.folder / PAGE

    def write_table(self, samples: Iterable[Sample]) -> Path:
        """A table of samples with their captions, with the whole paths of their pictures."""
        path = self.folder / TABLE
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_row(sample)) + "\n" for sample in samples)
        return path


def _line(proposal: Proposal) -> str:
    return json.dumps(asdict(proposal)) + "\n"


def _row(sample: Sample) -> dict[str, Any]:
    target, *controls = [os.path.abspath(str(picture)) for picture in (sample.target, *sample.controls)]
    prompt = sample.prompts[0] if len(sample.prompts) == 1 else list(sample.prompts)
    row = {"file_name": target, **({"control_file_name": controls} if controls else {}), "prompt": prompt}
    beside = {"mask_file_name": sample.mask, "rejected_file_name": sample.rejected}
    return row | {name: os.path.abspath(str(picture)) for name, picture in beside.items() if picture}


def _cards(proposals: Sequence[Proposal]) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor() as pool:
        for proposal, pictures in zip(proposals, pool.map(_pictures, proposals), strict=True):
            yield {
                "pictures": pictures,
                "caption": proposal.caption,
                "cut": proposal.cut,
                "key": printable(proposal.key),
                "file": printable(proposal.file or TABLE),
            }


def _pictures(proposal: Proposal) -> list[tuple[str, str]]:
    names = ["before", *(f"before, {number}" for number in range(2, len(proposal.controls) + 1))]
    paths = [*proposal.controls, proposal.target]
    titles = [*names[: len(proposal.controls)], "after" if proposal.controls else "picture"]
    return [(title, _thumbnail(Path(path))) for title, path in zip(titles, paths, strict=True)]


def _thumbnail(path: Path) -> str:
    """Nothing for a picture that has gone since."""
    try:
        return data_url(open_image(path, THUMBNAIL**2), THUMBNAIL)
    except UserError:
        return ""
