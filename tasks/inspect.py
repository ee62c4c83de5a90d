"""task=inspect: what may be wrong with the pairs of data.root. It reads pictures and changes nothing there."""

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from datamodules.errors import UserError, count_of, printable
from datamodules.files import replacing
from datamodules.images.duplicates import repeated
from datamodules.images.inspection import (
    Finding,
    Inspected,
    Kind,
    caption_findings,
    inspect_sample,
    long_captions,
    look,
    mostly_small,
    worst_first,
)
from datamodules.images.sample_set import SampleSet, held_out_of
from datamodules.images.samples import Sample
from datamodules.pairs import PairsDataModule
from lightning_modules.timing import ProgressLines
from tasks.encode import cached_data
from tasks.findings_sheet import end_of, write_findings_sheet
from tasks.placement import frozen_model
from tasks.terminal import log

# Of a sample's name in the terminal; inspect.csv has all of it.
LETTERS = 36
# In the terminal, and on the sheet of pictures.
ROWS, SHOWN = 40, 24
# Samples up to which a preview asks, too: a minute at most, for pairs of 12 megapixels on two cores.
QUICK = 500
# Pictures of samples that stand beside each other, as the control of several edits, are read once.
REMEMBERED = 32


def inspect(cfg: DictConfig, output_dir: Path) -> None:
    """Write inspect.csv, and inspect.png of the worst; print a table of them."""
    # What can not be used is a finding here.
    cfg.data.on_missing = cfg.data.on_bad_image = "skip"
    data, module = cached_data(cfg), frozen_model(cfg)
    data.configure_for(module)
    samples = data.sample_set.find()
    held = held_out_of(data.sample_set, samples, data.val_count, "samples")
    incomplete = [Finding(Kind.INCOMPLETE, *_divided(line)) for line in data.sample_set.incomplete]
    found = worst_first([*incomplete, *find_faults(samples, held, data.sample_set), *_long_captions(samples, module)])
    what = count_of(len(samples), "samples" if any(len(sample.controls) != 1 for sample in samples) else "pairs")
    for note in data.sample_set.notes:
        log.info(f"note: {note}")
    report, pictures = output_dir / "inspect.csv", output_dir / "inspect.png"
    for path in (report, pictures):  # of another time
        path.unlink(missing_ok=True)
    if not found:
        log.info(f"nothing found in {what} of {', '.join(data.roots)}")
        return
    _write(found, report)
    Console(stderr=True).print(_table(found, what))
    if any(finding.sample is not None for finding in found):
        write_findings_sheet(found, SHOWN, pictures)
        log.info(f"pictures of the worst: {pictures}")
    log.info(f"done: {count_of(len(found), 'findings')} in {what}: {counted(found)}; all of them: {report}")


def find_faults(samples: Sequence[Sample], held: set[int], sample_set: SampleSet) -> list[Finding]:
    """What is wrong with the pictures and the captions of complete samples; no picture is kept in memory.

    Args:
        held: the numbers of those that are held out.
    """
    seen = list(_each(samples, sample_set))
    found = mostly_small([finding for one in seen for finding in one.findings], len(samples))
    found += repeated(samples, [one.target for one in seen], [one.control for one in seen], held)
    return [*found, *caption_findings(samples)]


def faults_of(data: PairsDataModule) -> list[Finding]:
    """`find_faults` of samples that were scanned; none where there are so many that it would take long."""
    held_out = data.validation.samples if isinstance(data.validation, PairsDataModule) else []
    samples = [*data.samples, *held_out]
    if len(samples) > QUICK:
        return []
    return worst_first(find_faults(samples, set(range(len(data.samples), len(samples))), data.sample_set))


def counted(found: Sequence[Finding]) -> str:
    """How many findings there are of each kind, the worst first: `3 shifted, 2 nearly equal`."""
    return ", ".join(f"{count} {kind.label}" for kind, count in Counter(finding.kind for finding in found).items())


def _each(samples: Sequence[Sample], sample_set: SampleSet) -> Iterator[Inspected]:
    see = lru_cache(REMEMBERED)(look)
    progress = ProgressLines(len(samples), "inspected")
    with _pool() as (pool, workers):
        todo = iter(samples)
        waiting: list[Future[Inspected]] = []
        for number in range(1, len(samples) + 1):
            for sample in islice(todo, 2 * workers - len(waiting)):
                waiting.append(pool.submit(inspect_sample, sample, sample_set.root(sample).resolution, see))
            yield waiting.pop(0).result()
            progress.done(number)


@contextmanager
def _pool() -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """Decoding and Fourier transforms run beside each other in threads."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool, workers
    finally:
        pool.shutdown(cancel_futures=True)


def _divided(line: str) -> tuple[str, str]:
    """What is said of an incomplete sample: the file or the row, and what it lacks."""
    for between in (": ", " has ", " is "):
        before, found, after = line.partition(between)
        if found:
            return before, f"{between.strip(': ')} {after}".strip()
    return line, ""


def _long_captions(samples: Sequence[Sample], module: Any) -> list[Finding]:
    try:
        return long_captions(samples, lambda prompts: module.prompt_tokens(module.base.components, prompts))
    except UserError as error:
        log.info(f"note: the lengths of captions were not checked: {error}")
        return []


def _write(found: Sequence[Finding], path: Path) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("sample", "finding", "figure", "what to do", "target"))
        for kind, key, figure, sample, *_ in found:
            target = "" if sample is None else printable(str(sample.target))
            writer.writerow((key, kind.label, figure, kind.remedy, target))


def _table(found: Sequence[Finding], what: str) -> Table:
    table = Table(title=f"{count_of(len(found), 'findings')} in {what}", title_justify="left")
    table.add_column("sample", overflow="fold")
    for column in ("finding", "figure", "what to do"):
        table.add_column(column)
    for finding in found[:ROWS]:
        table.add_row(
            escape(end_of(finding.key, LETTERS)), finding.kind.label, escape(finding.figure), finding.kind.remedy
        )
    if len(found) > ROWS:
        table.caption = f"and {len(found) - ROWS} more: {counted(found[ROWS:])}"
    return table
