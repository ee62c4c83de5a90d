"""The pages fit the code and each other."""

import re

import pytest

from lightning_modules.family import Family
from tests.support.commands import ROOT
from tests.support.tiny_pipelines import MODELS

FOLDERS = ("", "docs", "benchmarks", "deploy", "tests", "assets/photos", "assets/shapes")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}


def test_adding_a_model_names_every_method_and_attribute_of_a_family():
    guide = (ROOT / "docs" / "add-a-model.md").read_text()
    for name in (*Family.__abstractmethods__, *Family.__annotations__, "condition_images", "geometry"):
        assert f"`{name}`" in guide
    assert all((ROOT / "conf" / "model" / f"{name}.yaml").is_file() for name in MODELS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("[!R]*.md") if f"({page.name}" not in index]


def test_goals_have_the_names_of_the_presets():
    presets = [path.read_text() for path in (ROOT / "conf" / "experiment").glob("*.yaml")]
    names = {name for text in presets for name in re.findall(r"^# Goal: (.*)$", text, re.M)}
    assert names <= set(re.findall(r"^## (.*)$", (ROOT / "docs" / "goals.md").read_text(), re.M))
    assert len(names) > 4


def test_each_promise_has_its_test():
    rows = re.findall(r"^\| .* \| `(.*)::(.*)` \|$", (ROOT / "tests" / "README.md").read_text(), re.M)
    assert len(rows) > 40
    for path, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"


def test_reading_order_names_only_existing_files():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = text.partition("## Reading order")[2].partition("## Inside")[0]
    names = re.findall(r"`([\w/]+\.(?:py|yaml))`", order)
    assert len(names) > 20
    places = (ROOT, ROOT / "lightning_modules", ROOT / "datamodules")
    assert not [name for name in names if not any((place / name).is_file() for place in places)]
