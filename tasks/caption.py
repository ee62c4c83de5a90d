"""task=caption: write the captions that data.root lacks, by a vision-language model."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from PIL import Image

from datamodules.errors import UserError, count_of, listing, printable
from datamodules.files import reading, replacing
from datamodules.images.decoding import image_size, open_image
from datamodules.images.sample_set import SampleSet
from datamodules.images.samples import Sample
from datamodules.images.windows import resize
from lightning_modules.captioner import Captioner
from lightning_modules.timing import ProgressLines
from report.page import TEMPLATE
from runs.run_folder import best_effort
from runs.signals import Stopped, stop
from tasks.encode import cached_data
from tasks.placement import compute_device
from tasks.terminal import log, silence_libraries

RECORDS, PAGE, TABLE = "captions.jsonl", "captions.html", "metadata.jsonl"


def caption(cfg: DictConfig, output_dir: Path) -> None:
    """Write missing captions next to their targets, or for tables into a new table in output_dir."""
    if cfg.captioner is None:
        raise UserError("task=caption needs the model that writes: captioner=qwen3_vl or captioner=qwen2_5_vl")
    data = cached_data(cfg).sample_set
    silence_libraries()
    captioner: Captioner = instantiate(cfg.captioner, _convert_="all")
    found = data.find_uncaptioned_too()
    samples = found.samples
    run = Captioning(captioner, data, Proposals(output_dir), cfg.overwrite)
    lacking = [sample for sample in samples if run.lacks(sample)]
    if not lacking and not len(run.proposals):
        log.info(f"all {len(samples)} samples of {listing(data.paths)} have a caption: overwrite=true rewrites them")
        return
    if packed := [s.key for s in lacking if not all(isinstance(one, Path) for one in (s.target, *s.controls))]:
        raise UserError(f"captions are written for image files; {listing(packed)} are packed in larger files")
    if kept := [str(s.caption_file) for s in lacking if s.caption_file and s.caption_file.suffix.lower() == ".json"]:
        raise UserError(f"overwrite=true: {listing(kept)} hold captions, and only text files are written. Remove them")
    if lacking:
        log.info(f"{len(lacking)} of {len(samples)} samples {'get a new' if cfg.overwrite else 'lack a'} caption")
        captioner.check_repository()
        usable, notes = data.check(lacking)
        for note in (*found.notes, *notes):
            log.info(f"note: {note}")
        if usable:
            captioner.load(lambda: compute_device(cfg))
            run.write([one.sample for one in usable], samples)
    run.finish(samples)


@dataclass(frozen=True)
class Proposal:
    """A caption that the model has written.

    Attributes:
        target, controls: paths of the images.
        file: its file; None for a sample of a table.
        cut: the answer was cut off at captioner.max_new_tokens.
    """

    key: str
    target: str
    controls: list[str]
    caption: str
    file: str | None
    cut: bool


class Proposals:
    """The captions in output_dir, with those of an earlier command, which is continued.

    Each batch is recorded before its captions are written to their files.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir
        self.path = output_dir / RECORDS
        self._known: dict[tuple[str, str], Proposal] = {}
        if self.path.is_file():
            with reading(self.path, "remove it, or choose another output_dir"):
                *lines, cut = self.path.read_text(encoding="utf-8").split("\n")
                self._add([Proposal(**json.loads(line)) for line in lines])
            if cut:  # by a killed process
                with replacing(self.path) as temporary:
                    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._known)

    def _add(self, proposals: Sequence[Proposal]) -> None:
        self._known |= {(one.target, one.key): one for one in proposals}

    def of(self, sample: Sample) -> Proposal | None:
        """Return the caption that was written for a sample."""
        return self._known.get((str(sample.target), sample.key))

    def append(self, proposals: Sequence[Proposal]) -> None:
        """Add the captions of a batch; they are on the disk when this returns."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(one)) + "\n" for one in proposals)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        self._add(proposals)

    def write_page(self, line: str) -> None:
        """Write a page of images and captions to review, and log its path."""
        template = TEMPLATE.from_string(Path(__file__).with_name(PAGE).read_text(encoding="utf-8"))
        cards = [
            {
                "images": [(name, Path(path).as_uri()) for name, path in _named_images(one)],
                "caption": one.caption,
                "cut": one.cut,
                "key": printable(one.key),
                "file": printable(one.file or TABLE),
            }
            for one in self._known.values()
        ]
        with best_effort(PAGE), replacing(self.folder / PAGE) as temporary:
            page = template.render(title=count_of(len(self), "captions"), line=line, samples=cards)
            temporary.write_text(page, encoding="utf-8")
        log.info(f"look at them: {self.folder / PAGE}")

    def write_table(self, samples: Sequence[Sample]) -> Path | None:
        """Write the samples of tables with their captions as a new table; return None if there is no new caption."""
        of_tables = [(sample, self.of(sample)) for sample in samples if sample.caption_file is None]
        if not any(proposal for _, proposal in of_tables):
            return None
        named = [replace(one, prompts=(proposal.caption,)) if proposal else one for one, proposal in of_tables]
        path = self.folder / TABLE
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_row(sample)) + "\n" for sample in named if sample.prompts)
        return path


def _named_images(proposal: Proposal) -> Iterator[tuple[str, str]]:
    for number, path in enumerate(proposal.controls, 1):
        yield "before" if number == 1 else f"before, {number}", os.path.abspath(path)
    yield "after" if proposal.controls else "image", os.path.abspath(proposal.target)


def _row(sample: Sample) -> dict[str, Any]:
    """Return a row of metadata.jsonl with absolute paths."""
    target, *controls = [os.path.abspath(str(path)) for path in (sample.target, *sample.controls)]
    prompt = sample.prompts[0] if len(sample.prompts) == 1 else list(sample.prompts)
    row = {"file_name": target, **({"control_file_name": controls} if controls else {}), "prompt": prompt}
    optional = {"mask_file_name": sample.mask, "rejected_file_name": sample.rejected}
    return row | {name: os.path.abspath(str(path)) for name, path in optional.items() if path}


@dataclass
class Captioning:
    """A command that writes captions.

    Attributes:
        overwrite: write a new caption for samples that have one.
        written: number of captions of this command.
        empty, unreadable: samples without one, for an empty answer or an unreadable image.
    """

    captioner: Captioner
    data: SampleSet
    proposals: Proposals
    overwrite: bool
    written: int = 0
    empty: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def lacks(self, sample: Sample) -> bool:
        """Return whether a caption is to be written for a sample."""
        if self.overwrite or sample.prompts:
            return self.overwrite
        if sample.caption_file is None:
            return self.proposals.of(sample) is None
        return not os.path.lexists(sample.caption_file)  # somebody may have written one since

    def write(self, lacking: Sequence[Sample], samples: Sequence[Sample]) -> None:
        """Caption in batches; a signal stops it after the current batch."""
        keys, done = {sample.key for sample in lacking}, 0
        progress = ProgressLines(len(lacking), "captions")
        try:
            for batch in batches(samples, self.captioner):
                chosen = [sample for sample in batch if sample.key in keys]
                if not chosen:
                    continue
                stop.busy_with = "this batch"
                self._write_batch(chosen)
                stop.busy_with = None
                stop.check()
                done += len(chosen)
                progress.done(done)
        except BaseException as error:
            if self.written:
                of_table = any(sample.caption_file is None for sample in samples)
                folder = f" with output_dir={shlex.quote(str(self.proposals.folder))}" if of_table else ""
                then = "starts again" if self.overwrite else "continues"
                error.add_note(f"{count_of(self.written, 'captions are')} written; the same command{folder} {then}")
                if isinstance(error, Stopped):
                    self._write_page()
            raise

    def _write_batch(self, batch: Sequence[Sample]) -> None:
        loaded = []
        for sample in batch:
            try:
                loaded.append((sample, self._load(sample)))
            except UserError as error:
                self._skip(sample, error)
        if not loaded:
            return
        try:
            inputs = self.captioner.prepare([images for _, images in loaded])
        except UserError as error:
            for sample, _ in loaded:
                self._skip(sample, error)
            return
        made = []
        for (sample, _), answer in zip(loaded, self.captioner(inputs), strict=True):
            if not answer.text:
                self.empty.append(sample.key)
            elif self.lacks(sample):
                file = None if sample.caption_file is None else str(sample.caption_file)
                controls = [str(control) for control in sample.controls]
                made.append(Proposal(sample.key, str(sample.target), controls, answer.text, file, answer.cut))
        self.proposals.append(made)
        for proposal in made:
            if proposal.file is not None:
                with replacing(Path(proposal.file)) as temporary:
                    temporary.write_text(proposal.caption + "\n", encoding="utf-8")
            self.written += 1

    def _load(self, sample: Sample) -> tuple[list[Image.Image], Image.Image]:
        *controls, target = [
            resize(open_image(path, self.captioner.max_area), self.captioner.shrunk(*image_size(path)))
            for path in (*sample.controls, sample.target)
        ]
        return controls, target

    def _skip(self, sample: Sample, error: UserError) -> None:
        """Skip a sample with an image that passed the check and is unreadable."""
        if self.data.on_bad_image == "error":
            raise error
        self.unreadable.append(f"{sample.key} ({printable(str(error))})")

    def _write_page(self) -> None:
        self.proposals.write_page(f"written by {self.captioner.name}; change a caption in its file")

    def finish(self, samples: Sequence[Sample]) -> None:
        """Write the table and the page, and log what was written."""
        if self.unreadable:
            log.info(f"note: skipped {len(self.unreadable)} unusable: {listing(self.unreadable)}")
        if self.empty:
            log.info(f"note: the model gave no answer for {len(self.empty)}, without a caption: {listing(self.empty)}")
        if cut := [sample.key for sample in samples if (one := self.proposals.of(sample)) and one.cut]:
            log.info(f"note: {count_of(len(cut), 'answers are')} cut off at captioner.max_new_tokens: {listing(cut)}")
        table = self.proposals.write_table(samples)
        if len(self.proposals):
            self._write_page()
        where = "next to their targets" if table is None else f"to {table}; train on it as data.root"
        log.info(f"done: {count_of(self.written, 'captions')} written {where}")


def batches(samples: Sequence[Sample], captioner: Captioner) -> Iterator[list[Sample]]:
    """Yield batches of equal sizes, which need no padding.

    They hold all samples, also those with a caption: a continued command has the batches of an uninterrupted one.
    """
    groups: dict[tuple[tuple[int, int], ...], list[Sample]] = {}
    with ThreadPoolExecutor() as pool:
        sizes = list(pool.map(lambda sample: _sizes(sample, captioner), samples))
    for sample, size in zip(samples, sizes, strict=True):
        groups.setdefault(size, []).append(sample)
    for group in groups.values():
        for first in range(0, len(group), captioner.batch_size):
            yield group[first : first + captioner.batch_size]


def _sizes(sample: Sample, captioner: Captioner) -> tuple[tuple[int, int], ...]:
    try:
        return tuple(captioner.shrunk(*image_size(path)) for path in (*sample.controls, sample.target))
    except UserError:  # it is not captioned
        return ()
