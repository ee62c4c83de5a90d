"""docs/models.md is what its command writes."""

import json

from benchmarks.models import MEMORY, MODELS, PAGE, page
from tasks.resolvers import CONF


def test_the_page_is_what_the_command_writes():
    assert page(json.loads(MEMORY.read_text())) == PAGE.read_text()


def test_every_model_has_a_row():
    names = {path.stem for path in (CONF / "model").glob("[!_]*.yaml")}
    assert {name for name in names if not name.endswith(("_fp8", "_fp4"))} == {*MODELS, "embedded"}
