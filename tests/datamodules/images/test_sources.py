"""A set of pairs gives the same samples in every form of storage; roots and their settings."""

import pickle
import shutil
import sys
from pathlib import Path

import pytest

from datamodules.images.decoding import image_size, verify_image
from datamodules.images.samples import Found, Root, Sample, as_roots, with_settings
from datamodules.images.sources import find_samples
from datamodules.images.windows import Window, load_image
from foundation.errors import UserError
from foundation.hashes import FileHashes, hash_file
from tests.support.pictures import make_pairs
from tests.support.stored import FORMS, as_parquet, as_saved, as_tars, picture, prompt

pytestmark = pytest.mark.usefixtures("data_set_cache")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_pairs(form, tmp_path, capfd):
    found = find_samples([Root(FORMS[form](tmp_path / "mine"))])
    assert found.incomplete == []
    assert [sample.prompts for sample in found.samples] == [(prompt(number),) for number in range(4)]
    for number, sample in enumerate(found.samples):
        assert sample.target.read_bytes() == picture(number + 10)
        assert [one.read_bytes() for one in sample.controls] == [picture(number)]
    assert len({sample.key for sample in found.samples}) == 4
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("make", [as_parquet, as_tars])
def test_packed_image_is_read_like_a_file_and_is_small_to_send(make, tmp_path):
    first, second = find_samples([Root(make(tmp_path / "mine"))]).samples[:2]
    assert image_size(first.target) == (32, 32)
    verify_image(first.target)
    assert load_image(first.target, Window.whole((32, 32))).shape == (3, 32, 32)
    again = pickle.loads(pickle.dumps(first))
    assert (again, hash(again)) == (first, hash(first))
    assert len(pickle.dumps(first)) < 2000
    assert first.target.signature()[0] != second.target.signature()[0] != second.controls[0].signature()[0]


@pytest.mark.parametrize("form", ["parquet", "tars"])
def test_changed_data_set_is_hashed_again(form, tmp_path):
    root = FORMS[form](tmp_path / "mine")
    before = find_samples([Root(root)]).samples[0].target
    (tmp_path / "hashes").write_text(FileHashes.line(hash_file(before)))
    hashes = FileHashes([tmp_path / "hashes"])
    assert hashes.get(before) is not None
    shutil.rmtree(tmp_path / "mine")
    FORMS[form](tmp_path / "mine")
    assert hashes.get(find_samples([Root(root)]).samples[0].target) is None


@pytest.mark.parametrize("form", [as_saved, as_parquet])
def test_one_data_set_of_two_spellings_has_the_same_images(tmp_path, monkeypatch, form):
    root = form(tmp_path / "mine")
    (tmp_path / "link").symlink_to("mine")
    monkeypatch.chdir(tmp_path)
    spelled = [root, root.relative_to(tmp_path), f"link/{root.relative_to(tmp_path / 'mine')}"]
    samples = [find_samples([Root(path)]).samples[1] for path in spelled]
    assert len({one.target for one in samples}) == len({one.controls for one in samples}) == 1
    assert str(samples[2].target) == f"{spelled[2].removesuffix('/.')} row 1 edited_image"


@pytest.mark.parametrize("kind", ["nothing", "text", "table that is lost"])
def test_roots_without_one_data_set_are_refused(tmp_path, kind):
    root, message = tmp_path / "x", r"neither a folder nor a \.csv or \.jsonl table, nor a .* \.tar file"
    if kind == "nothing":
        root.mkdir()
        message = "no pairs found. Looked for metadata.jsonl.*training_images/images/target/targets .*control_images"
    elif kind == "text":
        root.write_text("")
    else:
        (make_pairs(root, [(32, 32)]) / "metadata.csv").symlink_to("/nowhere")
        message = f"cannot read {root}/metadata.csv: it is a link to /nowhere"
    with pytest.raises(UserError, match=message) as error:
        find_samples([Root(root)])
    assert "\n" not in str(error.value)


def test_remote_images_are_to_be_copied():
    with pytest.raises(UserError, match="copy them here first") as error:
        find_samples([Root("https://me:secret@host/pairs.tar")])
    assert "secret" not in str(error.value)


def test_missing_library_of_data_sets_is_a_line(tmp_path, monkeypatch):
    root = as_saved(tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"mine needs the library datasets: pip install 'retouch\[datasets\]'"):
        find_samples([Root(root)])


SETTINGS = {"resolution": 1024, "prefix": "", "trigger_word": None, "columns": None, "pair_suffixes": None}


def test_a_root_has_its_own_settings_and_inherits_the_others():
    value = ["a", {"path": "b", "repeats": 3, "weight": 0.2, "resolution": [512, 768, 512], "prefix": "sks "}]
    assert as_roots("root", value, SETTINGS) == [
        Root("a", resolution=(1024,)),
        Root("b", repeats=3, weight=0.2, resolution=(512, 768), prefix="sks "),
    ]
    assert as_roots("root", None, SETTINGS) == as_roots("root", "", SETTINGS) == []


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ({"repeats": 2}, r"the path is missing. Write \{path: FOLDER, repeats: 2\}"),
        ({"path": "x", "repeat": 2}, "a root has no setting repeat; choose from path, repeats, weight, resolution"),
        ({"path": "x", "repeats": 0}, "data.root=x: repeats=0: must be a whole number from 1 to 10000"),
        (
            {"path": "x", "resolution": 8},
            "resolution=8: must be a whole number from 16 to 4096 or null or a list of them",
        ),
        ({"path": "x", "columns": ["a"]}, "columns=.*: must be null or a mapping {PATTERN:TEXT} with text each"),
        ({"path": "x", "pair_suffixes": ["_a", "_a"]}, "pair_suffixes=.*: must be two different endings"),
    ],
)
def test_wrong_settings_are_refused_for_a_root_and_for_all(root, message):
    with pytest.raises(UserError, match=message):
        as_roots("root", [root], SETTINGS)
    if general := {key: value for key, value in root.items() if key in SETTINGS}:
        [key] = general
        with pytest.raises(UserError, match=f"data.{key}=.*must be"):
            as_roots("root", "x", SETTINGS | general)


@pytest.mark.parametrize(
    ("caption", "prefix", "read"),
    [
        ("make it snow", "", "sks, make it snow"),
        ("who asks for it", "", "sks, who asks for it"),
        ("[trigger] in [trigger]", "", "sks in sks"),
        ("snow", "a photo of [trigger], ", "a photo of sks, snow"),
    ],
)
def test_trigger_word_is_in_every_caption_once(caption, prefix, read):
    found = Found([Sample("a", Path("a.png"), (), (caption,))], [])
    [sample] = with_settings(found, [Root("x", trigger_word="sks", prefix=prefix)]).samples
    assert sample.prompts == (read,)


def test_a_setting_that_does_not_apply_to_a_root_is_refused(tmp_path):
    folders, tars = make_pairs(tmp_path / "folders", [(32, 32)]), as_tars(tmp_path / "tars")
    columns = {"control": "source", "target": "target"}
    assert len(find_samples([Root(folders), Root(tars, columns=columns)]).samples) == 5
    for root, message in (
        (
            Root(folders, columns=columns),
            "data.columns is for tables, .*; .*/folders has another form. Leave it out, or",
        ),
        (Root(tars, pair_suffixes=("_start", "_end")), "data.pair_suffixes is for pairs in one folder; .* has"),
    ):
        with pytest.raises(UserError, match=message):
            find_samples([root])
