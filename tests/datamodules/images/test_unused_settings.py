"""What is said of columns and endings where no root has such things."""

import pytest

from datamodules.errors import UserError
from datamodules.images.framing import Framing
from datamodules.images.sample_set import SampleSet
from datamodules.images.sources import find_captioned, find_samples
from tests.support.pictures import make_pairs
from tests.support.stored import as_suffixes, as_tars

COLUMNS = {"control": "source", "target": "target"}
ENDS = ["_start", "_end"]


@pytest.fixture
def roots(tmp_path):
    made = {
        "folders": make_pairs(tmp_path / "folders", [(32, 32)]),
        "tars": as_tars(tmp_path / "tars"),
        "suffixes": as_suffixes(tmp_path / "suffixes"),
    }
    return {name: str(path) for name, path in made.items()}


def sample_set(root, val_root=None, source=find_samples, **settings):
    framing = Framing("exact", upscale=False, crop="center", crop_count=1, flip=False)
    defaults = {"resolution": None, "columns": None, "pair_suffixes": None}
    return SampleSet(root, val_root, source, "error", "error", framing, **defaults | settings)


@pytest.mark.parametrize(
    ("form", "setting", "message"),
    [
        (
            "folders",
            {"columns": {"goal": "x"}},
            r"data.columns is for tables, .* and .*/folders has none",
        ),
        ("suffixes", {"columns": COLUMNS}, "data.columns is for .* and .*/suffixes has none: leave it out"),
        (
            "folders",
            {"pair_suffixes": ENDS},
            r"data.pair_suffixes is for pairs in one folder, and .*ers has",
        ),
        ("tars", {"pair_suffixes": ENDS}, r"data.pair_suffixes is .* has none: leave it out"),
    ],
)
def test_a_setting_that_no_root_uses_is_a_line(roots, form, setting, message):
    for several in (sample_set(roots[form], **setting), sample_set({"path": roots[form], **setting})):
        for find in (several.find, several.find_uncaptioned_too):
            with pytest.raises(UserError, match=message) as error:
                find()
            assert "\n" not in str(error.value)


def test_a_setting_of_all_is_for_the_roots_of_its_form(roots):
    settings = {"columns": COLUMNS, "pair_suffixes": ENDS}
    assert len(sample_set(list(roots.values()), **settings).find().samples) == 9
    assert len(sample_set(roots["folders"], [roots["tars"], roots["suffixes"]], **settings).find().samples) == 9
    assert len(sample_set(roots["folders"], roots["tars"], columns=COLUMNS).find_uncaptioned_too().samples) == 1


def test_a_setting_of_one_root_is_for_its_own_form(roots):
    with pytest.raises(UserError, match=r"data.columns is for .* and .*/folders has none"):
        sample_set([{"path": roots["folders"], "columns": {"target": "image"}}, roots["tars"]], columns=COLUMNS).find()


def test_pictures_with_captions_have_no_pairs(roots):
    root = f"{roots['folders']}/training_images"
    assert len(sample_set(root, source=lambda roots: find_captioned(roots, None)).find_uncaptioned_too().samples) == 1
    for setting in ({"columns": COLUMNS}, {"pair_suffixes": ENDS}):
        with pytest.raises(UserError, match="training_images has none: leave it out"):
            sample_set(root, source=lambda roots: find_captioned(roots, None), **setting).find()
