"""docs/add-a-model.md is true to the code."""

import inspect
import re

import pytest

from lightning_modules.families.flux import denoise as flux_denoise
from lightning_modules.families.flux import module as flux
from lightning_modules.families.flux import pipeline as flux_pipeline
from lightning_modules.families.qwen_image import denoise as qwen_denoise
from lightning_modules.families.qwen_image import module as qwen
from lightning_modules.families.qwen_image import pipeline as qwen_pipeline
from lightning_modules.family import Family
from tests.support.commands import ROOT
from tests.support.tiny_pipelines import MODELS

GUIDE = (ROOT / "docs" / "add-a-model.md").read_text()
# Rows of its table of sizes: what is counted, and the part of the row that names it
SIZES = [
    (flux.FluxDev, "`FluxDev`"),
    *((one, "module.py of a family of its own") for one in (flux, qwen)),
    *((one, "denoise.py: ") for one in (flux_denoise, qwen_denoise)),
    *((one, "pipeline.py: ") for one in (flux_pipeline, qwen_pipeline)),
]


def test_every_method_and_attribute_of_a_family_is_named():
    for name in (*Family.__abstractmethods__, *Family.__annotations__, "condition_images", "geometry"):
        assert f"`{name}`" in GUIDE


def test_every_file_that_it_links_to_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)


@pytest.mark.parametrize(("thing", "row"), SIZES, ids=lambda value: getattr(value, "__name__", ""))
def test_sizes_are_as_stated(thing, row):
    [line] = [line for line in GUIDE.splitlines() if line.startswith("|") and row in line]
    least, most = map(int, re.search(r"(\d+) to (\d+)", line.split("|")[2]).groups())
    assert least <= len(inspect.getsource(thing).splitlines()) <= most


def test_yaml_of_the_smallest_is_as_short_as_stated():
    [line] = [line for line in GUIDE.splitlines() if "`FluxDev`" in line]
    longest = int(re.search(r"YAML of (\d+)", line).group(1))
    assert len((ROOT / "conf" / "model" / "flux_dev.yaml").read_text().splitlines()) <= longest
    assert all((ROOT / "conf" / "model" / f"{name}.yaml").is_file() for name in MODELS)
