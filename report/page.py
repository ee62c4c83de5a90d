"""HTML pages: report.html of a run and of a sweep."""

from pathlib import Path
from typing import Any

import jinja2

from datamodules.files import replacing

TEMPLATE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)


def render(path: Path, **page: Any) -> None:
    """Write a page atomically from report.html; parts that are not given are left out."""
    lists = ("numbers", "jobs", "rows", "steps", "results", "curves", "data_lines", "thumbs", "lines")
    nothing: dict[str, Any] = {name: [] for name in lists}
    nothing |= dict.fromkeys(("config", "monitor", "pictures_title", "subtitle", "figure"), "")
    nothing |= {"commands": {}, "unfinished": False, "row_width": 420}
    template = TEMPLATE.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with replacing(path) as temporary:
        temporary.write_text(template.render(nothing | page), encoding="utf-8")
