"""The results of the parts: JSON for programs, a table for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# Of the speed table: a fact, and what its column is called.
COLUMNS = {
    "seconds_per_step": "s/step",
    "samples_per_second": "samples/s",
    "tflops": "TFLOP/s",
    "share_of_matrix_peak": "of peak",
    "peak_memory_gb": "GB",
    "estimated_gb": "estimated",
    "share_of_estimate": "of estimate",
}


def write(path: Path, head: Mapping[str, Any], records: Mapping[str, Record]) -> None:
    """Write PATH.json and PATH.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({**head, "results": records}, indent=1, default=str) + "\n")
    path.with_suffix(".md").write_text(table(head, records), encoding="utf-8")


def table(head: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
    lines = ["# GPU check", "", f"{head['device']}, CUDA {head['cuda']}; {versions}", "", f"    {head['command']}", ""]
    if failed := failures(records):
        lines += ["Failed:", "", *[f"- {one}" for one in failed], ""]
    if checks := {name: record for name, record in records.items() if "row" not in record}:
        lines += ["| check | | seconds |", "|---|---|---|"]
        lines += [f"| {name} | {record['status']} | {record['seconds']:.1f} |" for name, record in checks.items()]
        for name, record in checks.items():
            facts = [f"- {fact}: {value}" for fact, value in record["facts"].items()]
            lines += ["", f"## {name}", "", *[f"- {one}" for one in record["wrong"]], *facts]
        lines.append("")
    if rows := [record for record in records.values() if "row" in record]:
        lines += ["## speed", "", f"| {' | '.join(['', *COLUMNS.values()])} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
        for record in rows:
            facts = record["facts"]
            what = f"{record['row']}{' = ' + facts['checkpointing'] if 'auto' in record['row'] and facts else ''}"
            numbers = ["" if facts.get(name) is None else str(facts[name]) for name in COLUMNS]
            if record["status"] != "passed" or "out_of_memory" in facts:
                numbers[0] = "out of memory" if "out_of_memory" in facts else record["status"]
            lines.append(f"| {' | '.join([what, *numbers])} |")
    return "\n".join(lines) + "\n"


def failures(records: Mapping[str, Record]) -> list[str]:
    """Return a line for each failure."""
    return [
        f"{name}: {one}" for name, record in records.items() if record["status"] == "failed" for one in record["wrong"]
    ]
