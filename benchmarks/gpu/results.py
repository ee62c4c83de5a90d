"""The results of the parts: JSON for programs, a table for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import goals

Facts = dict[str, Any]
Record = dict[str, Any]

# Of the speed table: a fact, and what its column is called.
COLUMNS = {
    "seconds_per_step": "s/step",
    "kernel_seconds": "of kernels",
    "kernel_share": "kernels run",
    "launches": "launches",
    "tflops": "TFLOP/s",
    "share_of_matrix_peak": "of peak",
    "peak_memory_gb": "GB",
    "estimated_gb": "estimated",
    "share_of_estimate": "of estimate",
}


def complete(record: Record, plan: Mapping[str, Any]) -> None:
    """Add to a row what was computed without a GPU, and the shares of both."""
    facts = record["facts"]
    if not plan or "seconds_per_step" not in facts:
        return
    facts |= plan
    facts["tflops"] = round(plan["useful_tflop"] / facts["seconds_per_step"], 2)
    facts["share_of_matrix_peak"] = round(facts["tflops"] / facts["matrix_peak_tflops"], 3)
    if facts["peak_memory_gb"] is not None and "estimated_gb" in facts:
        facts["share_of_estimate"] = round(facts["peak_memory_gb"] / facts["estimated_gb"], 3)


def write(path: Path, head: Mapping[str, Any], records: Mapping[str, Record]) -> None:
    """Write PATH.json and PATH.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({**head, "results": records}, indent=1, default=str) + "\n")
    path.with_suffix(".md").write_text(table(head, records), encoding="utf-8")


def table(head: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """Return the results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
    lines = ["# GPU check", "", f"{head['device']}, CUDA {head['cuda']}; {versions}", "", f"    {head['command']}", ""]
    if failed := failures(records):
        lines += ["Failed:", "", *[f"- {one}" for one in failed], ""]
    if rows := [record for record in records.values() if "row" in record]:
        lines += ["## speed", "", f"| {' | '.join(['', *COLUMNS.values()])} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
        for record in rows:
            facts = record["facts"]
            numbers = ["" if facts.get(name) is None else str(facts[name]) for name in COLUMNS]
            if record["status"] != "passed" or "out_of_memory" in facts:
                numbers[0] = "out of memory" if "out_of_memory" in facts else record["status"]
            lines.append(f"| {' | '.join([record['row'], *numbers])} |")
        if judged := goals.lines(head, records):
            lines += ["", *[f"- {one}" for one in judged]]
    if checks := {name: record for name, record in records.items() if "row" not in record}:
        lines += [*[""] * bool(rows), "## checks", "", "| check | | seconds |", "|---|---|---|"]
        lines += [f"| {name} | {record['status']} | {record['seconds']:.1f} |" for name, record in checks.items()]
        for name, record in checks.items():
            facts = [f"- {fact}: {value}" for fact, value in record["facts"].items()]
            lines += ["", f"## {name}", "", *[f"- {one}" for one in record["wrong"]], *facts]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def failures(records: Mapping[str, Record]) -> list[str]:
    """Return a line for each failure."""
    return [
        f"{name}: {one}" for name, record in records.items() if record["status"] == "failed" for one in record["wrong"]
    ]
