"""task=caption: write the captions that data.root lacks, by a vision-language model."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from PIL import Image

from cli.placement import compute_device
from cli.terminal import log, silence_libraries
from datamodules.images.decoding import image_size, open_image
from datamodules.images.samples import Sample
from datamodules.images.windows import resize
from extras.captioner import Answer, Captioner
from foundation.errors import UserError, count_of, listing
from foundation.files import read_bytes, reading, replacing
from lightning_modules.timing import ProgressLines
from report.quoting import program
from runs.signals import stop
from tasks.encode import cached_data

RECORDS, TABLE = "captions.jsonl", "metadata.jsonl"


def caption(cfg: DictConfig, output_dir: Path) -> None:
    """Write missing captions next to their targets, or for tables into a new table in output_dir."""
    if cfg.captioner is None:
        raise UserError("task=caption needs the model that writes: captioner=qwen3_vl or captioner=qwen2_5_vl")
    data = cached_data(cfg).sample_set
    silence_libraries()
    captioner: Captioner = instantiate(cfg.captioner, _convert_="all")
    found = data.find_uncaptioned_too()
    captions = Captions(output_dir, captioner.name, cfg.overwrite)
    lacking = [sample for sample in found.samples if captions.lacks(sample)]
    if not lacking and not captions.known:
        what = f"{len(found.samples)} samples of {listing(data.paths)}"
        log.info(f"all {what} have a caption: overwrite=true rewrites them")
        return
    if packed := [s.key for s in lacking if not all(isinstance(one, Path) for one in (s.target, *s.controls))]:
        raise UserError(f"captions are written for image files; {listing(packed)} are packed in larger files")
    if kept := [str(s.caption_file) for s in lacking if s.caption_file and s.caption_file.suffix.lower() == ".json"]:
        raise UserError(f"overwrite=true: {listing(kept)} hold captions, and only text files are written. Remove them")
    if lacking:
        what = "get a new" if cfg.overwrite else "lack a"
        log.info(f"{len(lacking)} of {len(found.samples)} samples {what} caption")
        captioner.check_repository()
        usable, notes = data.check(lacking)
        for note in (*found.notes, *notes):
            log.info(f"note: {note}")
        if usable:
            captioner.load(lambda: compute_device(cfg))
            write_captions(captioner, captions, [one.sample for one in usable])
    table = captions.write_table(found.samples)
    where = "next to their targets" if table is None else f"to {table}; train on it as data.root"
    if captions.unanswered:
        how = "Write them yourself, or choose another captioner"
        log.warning(f"note: the model gave no caption for {listing(captions.unanswered)}: refusals and the like. {how}")
    log.info(f"done: {count_of(captions.written, 'captions')} written {where}; review them: {program('studio')}")


def write_captions(captioner: Captioner, captions: "Captions", samples: Sequence[Sample]) -> None:
    """Caption in batches; a signal stops it after the current batch."""
    progress, done = ProgressLines(len(samples), "captions"), 0
    try:
        for batch in batches(samples, captioner):
            stop.busy_with = "this batch"
            inputs = captioner.prepare([_load(sample, captioner) for sample in batch])
            captions.add(batch, captioner(inputs))
            stop.busy_with = None
            stop.check()
            done += len(batch)
            progress.done(done)
    except BaseException as error:
        if captions.written:
            command = f"the same command with output_dir={shlex.quote(str(captions.folder))}"
            then = "starts again" if captions.overwrite else "continues"
            error.add_note(f"{count_of(captions.written, 'captions are')} written; {command} {then}")
        raise


def _load(sample: Sample, captioner: Captioner) -> tuple[list[Image.Image], Image.Image]:
    *controls, target = [
        resize(open_image(path, captioner.max_area), captioner.shrunk(*image_size(path)))
        for path in (*sample.controls, sample.target)
    ]
    return controls, target


def batches(samples: Sequence[Sample], captioner: Captioner) -> Iterator[list[Sample]]:
    """Yield batches of equal sizes, which need no padding."""
    groups: dict[tuple[tuple[int, int], ...], list[Sample]] = {}
    for sample in samples:
        sizes = tuple(captioner.shrunk(*image_size(path)) for path in (*sample.controls, sample.target))
        groups.setdefault(sizes, []).append(sample)
    for group in groups.values():
        yield from (group[i : i + captioner.batch_size] for i in range(0, len(group), captioner.batch_size))


@dataclass(frozen=True)
class Caption:
    """A caption that the model has written.

    Attributes:
        target: path of its target.
        file: the file of the caption; None for a sample of a table.
        cut: the answer was cut off at captioner.max_new_tokens.
        model: the captioner.
    """

    key: str
    target: str
    caption: str
    file: str | None
    cut: bool
    model: str = ""


def read_records(path: Path, repair: bool = False) -> list[Caption]:
    """Return the recorded captions in order; with `repair` remove a line that a killed process has not finished."""
    with reading(path, "remove it, or choose another output_dir"):
        *lines, cut = read_bytes(path).decode().split("\n")
        if cut and repair:
            os.truncate(path, path.stat().st_size - len(cut.encode()))
        rows = map(json.loads, lines)
        return [Caption(**{key: row[key] for key in Caption.__annotations__ if key in row}) for row in rows]


class Captions:
    """The captions in output_dir; a command continues an earlier one.

    Attributes:
        known: captions by the target and key of their samples.
        written: number of captions of this command.
        unanswered: keys of the samples for which the model gave no caption.
    """

    def __init__(self, folder: Path, model: str, overwrite: bool) -> None:
        self.folder, self.model, self.overwrite = folder, model, overwrite
        self.path = folder / RECORDS
        self.known: dict[tuple[str, str], Caption] = {}
        self.written = 0
        self.unanswered: list[str] = []
        if self.path.is_file():
            self.known = {(one.target, one.key): one for one in read_records(self.path, repair=True)}

    def of(self, sample: Sample) -> Caption | None:
        """Return the caption that was written for a sample."""
        return self.known.get((str(sample.target), sample.key))

    def lacks(self, sample: Sample) -> bool:
        """Return whether a caption is to be written for a sample."""
        if self.overwrite or sample.prompts:
            return self.overwrite
        if sample.caption_file is None:
            return self.of(sample) is None
        return not os.path.lexists(sample.caption_file)  # somebody may have written one since

    def add(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> None:
        """Record the answers on the disk, then write them to the samples' files."""
        made = [
            Caption(one.key, str(one.target), answer.text, str(one.caption_file or "") or None, answer.cut, self.model)
            for one, answer in zip(samples, answers, strict=True)
            if answer.text and self.lacks(one)
        ]
        self.unanswered += [one.key for one, answer in zip(samples, answers, strict=True) if not answer.text]
        if cut := [one.key for one in made if one.cut]:
            log.info(f"note: cut off at captioner.max_new_tokens: {listing(cut)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(one)) + "\n" for one in made)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        for one in made:
            self.known[one.target, one.key] = one
            if one.file is not None:
                with replacing(Path(one.file)) as temporary:
                    temporary.write_text(one.caption + "\n", encoding="utf-8")
            self.written += 1

    def write_table(self, samples: Sequence[Sample]) -> Path | None:
        """Write the samples of tables with their captions as a new table; return None without a new caption."""
        of_tables = [(sample, self.of(sample)) for sample in samples if sample.caption_file is None]
        if not any(new for _, new in of_tables):
            return None
        path = self.folder / TABLE
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for sample, new in of_tables:
                if prompts := [new.caption] if new else list(sample.prompts):
                    file.write(json.dumps(_row(sample, prompts)) + "\n")
        return path


def _row(sample: Sample, prompts: list[str]) -> dict[str, Any]:
    """Return a row of metadata.jsonl with absolute paths."""
    controls = [os.path.abspath(str(path)) for path in sample.controls]
    one = {"file_name": sample.target, "mask_file_name": sample.mask, "rejected_file_name": sample.rejected}
    row: dict[str, Any] = {name: os.path.abspath(str(path)) for name, path in one.items() if path}
    return row | ({"control_file_name": controls} if controls else {}) | {"prompt": prompts}
