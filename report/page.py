"""HTML pages: report.html of a run and of a sweep, and those of tasks."""

from pathlib import Path
from typing import Any

import jinja2

from datamodules.files import replacing

TEMPLATE = jinja2.Environment(autoescape=True)
REPORT = Path(__file__).with_name("report.html")


def render(path: Path, template: Path = REPORT, **page: Any) -> None:
    """Write a page atomically from a template; parts that are not given are left out."""
    text = TEMPLATE.from_string(template.read_text(encoding="utf-8")).render(page)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
