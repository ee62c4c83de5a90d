"""task=caption: write the captions that data.root lacks, by a vision-language model."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from PIL import Image

from datamodules.errors import UserError, count_of, listing, printable
from datamodules.files import replacing
from datamodules.images.decoding import image_size, open_image
from datamodules.images.sample_set import SampleSet
from datamodules.images.samples import Sample
from datamodules.images.windows import resize
from lightning_modules.captioner import Captioner
from lightning_modules.timing import ProgressLines
from runs.run_folder import best_effort
from runs.signals import Stopped, stop
from tasks.encode import cached_data
from tasks.placement import compute_device
from tasks.proposals import Proposal, Proposals
from tasks.terminal import log, silence_libraries


def caption(cfg: DictConfig, output_dir: Path) -> None:
    """Write what is missing: beside each target, or for tables a new one in output_dir."""
    if cfg.captioner is None:
        raise UserError("task=caption needs the model that writes: captioner=qwen3_vl or captioner=qwen2_5_vl")
    data = cached_data(cfg).sample_set
    silence_libraries()
    captioner: Captioner = instantiate(cfg.captioner, _convert_="all")
    found = data.find_uncaptioned_too()
    samples = found.samples
    run = Captioning(captioner, data, Proposals(output_dir), cfg.overwrite)
    lacking = run.lacking(samples)
    if not lacking and not len(run.proposals):
        log.info(f"all {len(samples)} samples of {listing(data.paths)} have a caption: overwrite=true writes them anew")
        return
    if packed := [s.key for s in lacking if not all(isinstance(one, Path) for one in (s.target, *s.controls))]:
        raise UserError(f"captions are written for pictures that are files; {listing(packed)} stand in larger ones")
    if kept := [str(s.caption_file) for s in lacking if s.caption_file and s.caption_file.suffix.lower() == ".json"]:
        raise UserError(f"overwrite=true: {listing(kept)} hold captions, and only text files are written. Remove them")
    if lacking:
        log.info(f"{len(lacking)} of {len(samples)} samples {'get a new' if cfg.overwrite else 'lack a'} caption")
        captioner.check()
        checked, notes = data.check(lacking)
        usable = [one.sample for one in checked]
        for note in (*found.notes, *notes):
            log.info(f"note: {note}")
        if usable:
            captioner.load(lambda: compute_device(cfg))
            _write(run, usable, samples)
    _finish(run, samples)


def _write(run: "Captioning", lacking: Sequence[Sample], samples: Sequence[Sample]) -> None:
    """Write the captions; what is done when it ends early is kept, and said."""
    try:
        run.write(lacking, samples)
    except BaseException as error:
        if run.written:
            error.add_note(_kept(run, samples))
        if run.written and isinstance(error, Stopped):
            _write_page(run)
        raise


class Captioning:
    """Captions on their way from the model to their files.

    Args:
        overwrite: whether samples that have a caption get another one.

    Attributes:
        written: how many of this command.
        empty, unreadable: the samples without one, for an empty answer or a picture.
    """

    def __init__(self, captioner: Captioner, data: SampleSet, proposals: Proposals, overwrite: bool) -> None:
        self.captioner = captioner
        self.data = data
        self.proposals = proposals
        self.overwrite = overwrite
        self.written = 0
        self.empty: list[str] = []
        self.unreadable: list[str] = []

    def lacking(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those to write a caption for."""
        return [sample for sample in samples if self.overwrite or not self._has_caption(sample)]

    def _has_caption(self, sample: Sample) -> bool:
        if sample.prompts or sample.caption_file is None:
            return bool(sample.prompts) or self.proposals.of(sample) is not None
        return os.path.lexists(sample.caption_file)  # somebody may have written one since

    def write(self, lacking: Sequence[Sample], samples: Sequence[Sample]) -> None:
        """Batch after batch; a signal ends it behind the present one."""
        wanted, seen = {sample.key for sample in lacking}, 0
        progress = ProgressLines(len(lacking), "captions")
        for batch in batches(samples, self.captioner):
            chosen = [sample for sample in batch if sample.key in wanted]
            if not chosen:
                continue
            stop.busy_with = "this batch"
            self._write_batch(chosen)
            stop.busy_with = None
            stop.check()
            seen += len(chosen)
            progress.done(seen)

    def _write_batch(self, batch: Sequence[Sample]) -> None:
        loaded = []
        for sample in batch:
            try:
                loaded.append((sample, self._load(sample)))
            except UserError as error:
                self._pass_over(sample, error)
        if not loaded:
            return
        try:
            inputs = self.captioner.prepare([pictures for _, pictures in loaded])
        except UserError as error:
            for sample, _ in loaded:
                self._pass_over(sample, error)
            return
        made = []
        for (sample, _), answer in zip(loaded, self.captioner(inputs), strict=True):
            if not answer.text:
                self.empty.append(sample.key)
            elif self.overwrite or not self._has_caption(sample):
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

    def _pass_over(self, sample: Sample, error: UserError) -> None:
        """A picture that looked whole and is not."""
        if self.data.on_bad_image == "error":
            raise error
        self.unreadable.append(f"{sample.key} ({printable(str(error))})")


def batches(samples: Sequence[Sample], captioner: Captioner) -> Iterator[list[Sample]]:
    """Batches of equal sizes, which need no padding.

    Of all samples, those with a caption too: what a command goes on with has the batches that it would have had.
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
    except UserError:  # it is none of those that are captioned
        return ()


def _kept(run: Captioning, samples: Sequence[Sample]) -> str:
    """What to do after a command that did not end."""
    place = ""
    if any(sample.caption_file is None for sample in samples):
        place = f" with output_dir={shlex.quote(str(run.proposals.folder))}"
    then = "begins anew" if run.overwrite else "goes on"
    return f"{count_of(run.written, 'captions are')} written; the same command{place} {then}"


def _write_page(run: Captioning) -> None:
    with best_effort("captions.html"):
        page = run.proposals.write_page([f"written by {run.captioner.name}; change a caption in its file"])
        log.info(f"look at them: {page}")


def _finish(run: Captioning, samples: Sequence[Sample]) -> None:
    """Say what was written, and what comes next."""
    if run.unreadable:
        log.info(f"note: skipped {len(run.unreadable)} unusable: {listing(run.unreadable)}")
    if run.empty:
        log.info(f"note: the model said nothing of {len(run.empty)}, and nothing is written: {listing(run.empty)}")
    if cut := [sample.key for sample in samples if (one := run.proposals.of(sample)) and one.cut]:
        log.info(f"note: {count_of(len(cut), 'answers are')} cut off at captioner.max_new_tokens: {listing(cut)}")
    table = _write_table(run, samples)
    if len(run.proposals):
        _write_page(run)
    where = "beside their targets" if table is None else f"to {table}, which has the samples that had one, too"
    log.info(f"done: {count_of(run.written, 'captions')} written {where}")
    if table is not None and len(run.data.roots) > 1:
        log.info(f"name {table} in data.root, in the place of the tables there")
    else:
        log.info(f"when they are right, train on them: {_train_command(table)}")


def _write_table(run: Captioning, samples: Sequence[Sample]) -> Path | None:
    """The samples of tables in a new one; None where none of them got a caption."""
    rows = [(sample, run.proposals.of(sample)) for sample in samples if sample.caption_file is None]
    if not any(proposal for _, proposal in rows):
        return None
    named = [replace(sample, prompts=(proposal.caption,)) if proposal else sample for sample, proposal in rows]
    return run.proposals.write_table(sample for sample in named if sample.prompts)


def _train_command(table: Path | None) -> str:
    """Trains on the same data, or on the new table."""
    overrides = HydraConfig.get().overrides.task
    same = [one for one in overrides if re.match(r"(data|model)[.=]", one)]
    if not any(one.startswith("model=") for one in same):
        same.insert(0, "model=flux_dev" if "data=captions" in same else "model=flux_kontext")
    if table is not None:
        same = [one for one in same if not one.startswith("data.root=")] + [f"data.root={table}"]
    return " ".join(["python train.py", *map(shlex.quote, same)])
