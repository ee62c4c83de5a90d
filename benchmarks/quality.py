"""Measure the figures of docs/quality.md and of the study, benchmarks/quality.md, and write their tables and images.

    python benchmarks/quality.py                   # everything; a stopped sweep resumes
    python benchmarks/quality.py rank slider       # some sections
    python benchmarks/quality.py --list            # sections, and rows older than their settings

Each row is a Hydra multirun of train.py over seeds, on one core; two rows run at once. Runs are kept in
outputs/quality, figures in benchmarks/results/quality.json with a hash of the composed settings, the base's weights,
the photographs, and the code of benchmarks/ and assets/ that writes and measures. A row is measured again if its hash
has changed, and a test fails while it has not been. Changes of the program itself are not part of the hash.
"""

import argparse
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.labels import labelled, save_small  # noqa: E402
from benchmarks.photos import options, preservation, repairs, sliders  # noqa: E402
from benchmarks.photos.runs import Section, table  # noqa: E402
from benchmarks.shapes import subject  # noqa: E402
from cli.terminal import silence_libraries  # noqa: E402

RECORDS = ROOT / "benchmarks" / "results" / "quality.json"
DOCS = ROOT / "docs"
PAGES = (DOCS / "quality.md", ROOT / "benchmarks" / "quality.md")
SECTIONS: dict[str, Section] = {
    section.name: section
    for module in (options, preservation, sliders, repairs, subject)
    for section in module.SECTIONS
}
_WRITING = threading.Lock()


def read_records() -> dict[str, dict[str, Any]]:
    """Return the figures and hashes by section and row."""
    return json.loads(RECORDS.read_text()) if RECORDS.is_file() else {}


def outdated(section: Section) -> list[str]:
    """Return the rows whose recorded hash is not the present one."""
    rows = read_records().get(section.name, {})
    return [label for label in section.rows if rows.get(label, {}).get("hash") != section.hash(label)]


def measure(section: Section, label: str, hash: str) -> None:
    """Measure a row and record it, with the hash of before."""
    figures = section.measure(section.rows[label])
    kept = [{header: float(f"{one[header]:.6g}") for header in section.columns if header in one} for one in figures]
    with _WRITING:
        records = read_records()
        found = records.get(section.name, {}) | {label: {"hash": hash, "seeds": kept}}
        records[section.name] = {row: found[row] for row in section.rows if row in found}
        RECORDS.write_text(json.dumps({name: records[name] for name in SECTIONS if name in records}, indent=1) + "\n")


def written(page: str) -> str:
    """Return the page with the tables of the records between its markers."""
    for name, rows in read_records().items():
        text = table(SECTIONS[name], {label: row["seeds"] for label, row in rows.items()})
        before, marker, after = page.partition(f"<!-- {name} -->\n")
        if marker:
            page = f"{before}{marker}{text}\n{after[after.index('<!-- end -->') :]}"
    return page


def main() -> None:
    """Measure the rows that are not up to date, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="by default all")
    parser.add_argument("--list", action="store_true", help="only list what would be measured")
    parser.add_argument("--workers", type=int, default=2, help="rows at once, one core each")
    arguments = parser.parse_args()
    silence_libraries()
    chosen = [SECTIONS[name] for name in arguments.sections or SECTIONS]
    rows = [(section, label) for section in chosen for label in outdated(section)]
    if arguments.list:
        print("\n".join(f"{section.name}: {label}" for section, label in rows))
        return
    for section in chosen:
        if section.write is not None:
            section.write()
    failed = False
    with ThreadPoolExecutor(arguments.workers) as pool:
        started = {pool.submit(measure, *row, row[0].hash(row[1])): row for row in rows}
        try:
            for number, done in enumerate(as_completed(started), start=1):
                section, label = started[done]
                error = done.exception()
                failed |= error is not None
                print(f"{number} of {len(rows)}  {section.name}: {label}  {error or ''}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    for section in chosen:
        image = DOCS / f"{section.name}.webp"
        is_new = not image.is_file() or any(one is section for one, _ in rows)
        if section.image is not None and is_new and not outdated(section):
            save_small(labelled(section.image(), section.headers, section.labels), image)
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
