"""Settings of data sets, by the real command line."""

import pytest

from tests.support.commands import scanned, short
from tests.support.stored import FORMS, picture, write_tar

pytestmark = pytest.mark.usefixtures("data_set_cache")


def test_trains_from_a_data_set_with_workers(run, tiny, tmp_path):
    root = FORMS["parquet"](tmp_path / "mine")
    text = run("train", *short(tiny, root, tmp_path / "run", 1), "data.num_workers=1").text
    assert "4 pairs" in text
    assert "Warning" not in text


def test_settings_reach_the_source_as_hydra_gives_them(tmp_path):
    (tmp_path / "mine").mkdir()
    for name, number in (("a-raw", 0), ("a-graded", 1)):
        (tmp_path / "mine" / f"{name}.png").write_bytes(picture(number))
    (tmp_path / "mine" / "a.txt").write_text("one\ntwo")
    assert len(scanned(f"data.root={tmp_path}/mine", "data.pair_suffixes=[-raw,-graded]").training.samples) == 1
    members = {"0.a.png": picture(0), "0.b.png": picture(1), "0.c.png": picture(2), "0.txt": b"x"}
    tar = write_tar(tmp_path / "x.tar", members)
    [sample] = scanned(f"data.root={tar}", "data.columns={control: [a, b], target: c}").training.samples
    assert len(sample.controls) == 2
