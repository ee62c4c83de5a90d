"""Pages from templates: report.html of a run and of a sweep, pages of tasks and of the studio, and model cards."""

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from foundation.files import replacing
from report.quoting import code, plain, program

REPORT = Path(__file__).with_name("report.html")


@cache
def templates(folder: Path) -> jinja2.Environment:
    """Return the templates of a folder; those of HTML may use the parts, the style and the script of reports."""
    loader = jinja2.FileSystemLoader([folder, REPORT.parent])
    escapes = jinja2.select_autoescape(["html"])
    environment = jinja2.Environment(loader=loader, autoescape=escapes, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(code=code, plain=plain)
    environment.globals.update(program=program)
    return environment


def render(path: Path, template: Path = REPORT, **page: Any) -> None:
    """Write a page atomically from a template, HTML or Markdown; parts that are not given are left out."""
    text = templates(template.parent).get_template(template.name).render(page)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
