"""task=inspect: find faults of the samples of data.root. It changes nothing there."""

import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import repeat
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from PIL import Image, ImageChops, ImageOps

from cli.placement import frozen_model
from cli.terminal import log
from datamodules.images.decoding import open_image, open_mask
from datamodules.images.sample_set import SampleSet
from datamodules.images.samples import ImageFile, Sample
from datamodules.images.windows import resize
from extras.inspection import Finding, Kind, inspect_sample, look, repeated
from foundation.errors import UserError, count_of, printable
from lightning_modules.timing import ProgressLines
from report.images import labelled_row, write_figure
from report.tables import write_rows
from tasks.contact_sheet import Panel, draw_panels
from tasks.encode import cached_data

# Lines in the terminal, and samples on the sheet of images.
LINES, SHOWN = 40, 24
# Images of neighbouring samples, as the control of several edits, are read once.
REMEMBERED = 32
# Box of an image on the sheet, in pixels, and the factor by which differences are enlarged.
BOX, STRONGER = (400, 300), 8


def inspect(cfg: DictConfig, output_dir: Path) -> None:
    """Write inspect.csv, and inspect.png of the worst; print the first ones."""
    cfg.data.on_missing = cfg.data.on_bad_image = "skip"  # they are findings here
    data = cached_data(cfg)
    data.configure_for(frozen_model(cfg))
    scanned = data.sample_set.find()
    samples = scanned.samples
    held = data.sample_set.held_out(samples, data.val_count, "samples")
    incomplete = [Finding(Kind.INCOMPLETE, line, "") for line in scanned.incomplete]
    found = [*incomplete, *find_faults(samples, held, data.sample_set)]
    found.sort(key=lambda finding: list(Kind).index(finding.kind))
    what = count_of(len(samples), "samples" if any(len(sample.controls) != 1 for sample in samples) else "pairs")
    for note in scanned.notes:
        log.info(f"note: {note}")
    report, sheet = output_dir / "inspect.csv", output_dir / "inspect.png"
    for path in (report, sheet):  # of an earlier command
        path.unlink(missing_ok=True)
    if not found:
        log.info(f"nothing found in {what} of {', '.join(data.roots)}")
        return
    write_rows(report, [_row(finding) for finding in found])
    remedies = {kind: f" ({kind.remedy})" for kind in Kind}  # shown once each
    for kind, key, figure, *_ in found[:LINES]:
        extent = f", {figure}" if figure else ""
        log.info(f"{kind.label}: {key}{extent}{remedies.pop(kind, '')}")
    if shown := _choose(found, SHOWN):
        panels = [_panel(findings) for findings in shown]
        write_figure(draw_panels(panels, columns=min(2, len(panels)), width=8.0, height=2.7), sheet)
        log.info(f"images of the worst: {sheet}")
    kinds = Counter(finding.kind.label for finding in found)
    counts = ", ".join(f"{count} {label}" for label, count in kinds.items())
    log.info(f"done: {count_of(len(found), 'findings')} in {what}: {counts}; all of them: {report}")


def find_faults(samples: Sequence[Sample], held: set[int], sample_set: SampleSet) -> list[Finding]:
    """Return the faults of complete samples; no image is kept in memory.

    Args:
        held: indices of the samples that are held out.
    """
    progress, see, seen = ProgressLines(len(samples), "inspected"), lru_cache(REMEMBERED)(look), []
    resolutions = (sample_set.root(sample).resolution for sample in samples)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in pool.map(inspect_sample, samples, resolutions, repeat(see)):
            seen.append(one)
            progress.done(len(seen))
    found = [finding for one in seen for finding in one.findings]
    found += repeated(samples, [one.target for one in seen], [one.control for one in seen], held)
    return found


def _row(finding: Finding) -> dict[str, str]:
    kind, key, figure, sample, *_ = finding
    target = "" if sample is None else printable(str(sample.target))
    return {"sample": key, "finding": kind.label, "figure": figure, "what to do": kind.remedy, "target": target}


def _choose(found: Sequence[Finding], most: int) -> list[list[Finding]]:
    of_sample: dict[Sample, list[Finding]] = {}
    for finding in found:
        if finding.sample is not None:
            of_sample.setdefault(finding.sample, []).append(finding)
    return list(of_sample.values())[:most]


def _panel(findings: list[Finding]) -> Panel:
    """Return control, target and an image that shows the first fault, with all faults of the sample."""
    sample, other, kind = findings[0].sample, findings[0].other, findings[0].kind
    assert sample is not None
    images = {"control": _open(sample.controls[0])} if sample.controls else {}
    target = images["target"] = _open(sample.target)
    control = resize(images.get("control", target), target.size)
    if kind in (Kind.SHIFTED, Kind.SCALED, Kind.EQUAL, Kind.NEARLY_EQUAL):
        change = ImageChops.difference(control, target)
        images[f"difference x {STRONGER}"] = change.point(lambda level: min(255, STRONGER * level))
    elif kind is Kind.MASK and sample.mask is not None:
        images["mask"] = _open(sample.mask, mask=True)
    elif other is not None:
        role, path = (
            ("control", other.controls[0]) if findings[0].figure.startswith("control") else ("target", other.target)
        )
        images[f"{role} of {other.key[-24:]}"] = _open(path)
    framed = {name: ImageOps.pad(image, BOX, color="white") for name, image in images.items()}
    faults = textwrap.shorten(";  ".join(f"{one.kind.label}: {one.figure}" for one in findings), 92, placeholder=" ...")
    return Panel(np.asarray(labelled_row(framed)), f"{sample.key[-92:]}\n{faults}", sample.prompts[0])


def _open(path: ImageFile, mask: bool = False) -> Image.Image:
    """Return a small copy, of a mask its weights; grey for a file that cannot be read."""
    try:
        return ImageOps.contain(open_mask(path).convert("RGB") if mask else open_image(path, BOX[0] * BOX[1]), BOX)
    except UserError:
        return Image.new("RGB", BOX, "lightgray")
