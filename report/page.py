"""HTML pages: report.html of a run and of a sweep."""

from pathlib import Path
from typing import Any

import jinja2

from datamodules.files import replacing

TEMPLATE = jinja2.Environment(autoescape=True)


def render(path: Path, **page: Any) -> None:
    """Write a page atomically from report.html; parts that are not given are left out."""
    template = TEMPLATE.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with replacing(path) as temporary:
        temporary.write_text(template.render(page), encoding="utf-8")
