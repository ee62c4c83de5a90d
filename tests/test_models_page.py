"""docs/models.md is what its command writes."""

import json
import re

from benchmarks.models import MEMORY, PAGE, download, gigabytes, page
from cli.resolvers import CONF
from foundation.catalogue import catalogue


def test_the_page_is_what_the_command_writes():
    assert page(json.loads(MEMORY.read_text())) == PAGE.read_text()


def test_readme_and_catalogue_have_the_same_memory_and_download_with_the_gigabyte_of_cuda():
    memory, readme = json.loads(MEMORY.read_text()), (PAGE.parent.parent / "README.md").read_text()
    for name, rows in memory.items():
        [row] = re.findall(rf"^\| `{name}` \| (.*) \|$", readme, re.MULTILINE)
        sizes, model = [f"{size:.0f}" for size in gigabytes(rows)], catalogue()[name]
        assert row.split(" | ")[-5:] == sizes
        assert [*map(str, (*model.training, model.encoding, model.download))] == sizes
    assert memory["flux_kontext"]["bf16"]["encoding"] == 10.8, "T5 and CLIP are 9.8 GB"


def test_the_download_is_that_of_all_weights():
    assert download("flux_kontext") == json.loads(MEMORY.read_text())["flux_kontext"]["download"]
    assert 33 < download("flux_kontext") < 35


def test_settings_of_krea_2_name_their_sources_and_what_retouch_leaves_out():
    text = (CONF / "model" / "krea2.yaml").read_text()
    assert "musubi-tuner. ai-toolkit's presets draw uniformly" in text
    for option in ("kv_cache", "match_target_res"):
        assert option in text
        assert option in PAGE.read_text()


def test_every_model_has_a_row():
    names = {path.stem for path in (CONF / "model").glob("[!_]*.yaml")}
    rows = re.findall(r"^\| `(\w+)` \| \[", PAGE.read_text(), re.MULTILINE)
    assert {name for name in names if not name.endswith(("_fp8", "_fp4"))} == {*rows, "embedded"}
