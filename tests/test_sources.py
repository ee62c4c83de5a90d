"""Training from each form in which people have data sets, by the real command line."""

import pytest
from hydra.utils import instantiate

from tests.support.combinations import first
from tests.support.commands import compose, short
from tests.support.stored import FORMS, picture, write_tar


@pytest.fixture(autouse=True)
def _own_data_set_cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("form", first(1, ["parquet", "tars", "suffixes"]))
def test_trains_from(form, run, tiny, tmp_path):
    """Equal images are encoded once: from the second form on they are in the cache."""
    root = FORMS[form](tmp_path / "mine")
    settings = ["data.num_workers=1", "data.val_count=1", "callbacks.validation.metrics={}"]
    text = run("train", *short(tiny, root, tmp_path / "run", 2), *settings).text
    assert "3 pairs" in text
    assert (tmp_path / "run" / "lora" / "last").is_dir()
    assert "Warning" not in text


def scanned(*overrides):
    data = instantiate(compose("train", "data=pairs", *overrides).data, _convert_="all")
    data.scan()
    return data


def test_settings_of_a_root_name_its_columns_and_its_split(tmp_path):
    root = FORMS["snapshot"](tmp_path / "mine")
    columns = "{control: edited_image, target: source_image}"
    assert len(scanned(f'data.root=[{{path: "{root}#test", columns: {columns}}}]').samples) == 1
    assert len(scanned(f'data.root="{root}#test"').samples) == 1


def test_settings_reach_the_source_as_hydra_gives_them(tmp_path):
    (tmp_path / "mine").mkdir()
    for name, number in (("a-raw", 0), ("a-graded", 1)):
        (tmp_path / "mine" / f"{name}.png").write_bytes(picture(number))
    (tmp_path / "mine" / "a.txt").write_text("one\ntwo")
    assert len(scanned(f"data.root={tmp_path}/mine", "data.pair_suffixes=[-raw,-graded]").samples) == 1
    members = {"0.a.png": picture(0), "0.b.png": picture(1), "0.c.png": picture(2), "0.txt": b"x"}
    tar = write_tar(tmp_path / "x.tar", members)
    [sample] = scanned(f"data.root={tar}", "data.columns={control: [a, b], target: c}").samples
    assert len(sample.controls) == 2
