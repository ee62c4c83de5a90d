"""Pages from templates: report.html of a run and of a sweep, pages of tasks, and model cards."""

from pathlib import Path
from typing import Any

import jinja2

from datamodules.files import replacing
from report.quoting import code, plain

REPORT = Path(__file__).with_name("report.html")


def render(path: Path, template: Path = REPORT, **page: Any) -> None:
    """Write a page atomically from a template, HTML or Markdown; parts that are not given are left out."""
    templates = jinja2.Environment(autoescape=template.suffix == ".html", trim_blocks=True, lstrip_blocks=True)
    templates.filters.update(code=code, plain=plain)
    text = templates.from_string(template.read_text(encoding="utf-8")).render(page)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
