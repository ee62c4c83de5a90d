"""One set of pairs gives the same samples in whichever form it is stored."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from datamodules.errors import UserError
from datamodules.files import Packed
from datamodules.hashes import FileHashes, hash_file
from datamodules.images.decoding import image_size, verify_image
from datamodules.images.samples import Root, Slice
from datamodules.images.sources import find_samples
from datamodules.images.windows import Window, load_image
from tests.support.commands import ROOT
from tests.support.pictures import make_pairs
from tests.support.stored import FORMS, as_arrow, as_parquet, as_saved, as_suffixes, as_tars, picture, prompt


def content(one) -> bytes:
    return one.read() if isinstance(one, Packed) else one.read_bytes()


@pytest.fixture(autouse=True)
def _own_data_set_cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(form, tmp_path, capfd):
    found = find_samples([Root(FORMS[form](tmp_path / "mine"))])
    assert found.incomplete == []
    assert [sample.prompts for sample in found.samples] == [(prompt(number),) for number in range(4)]
    for number, sample in enumerate(found.samples):
        assert content(sample.target) == picture(number + 10)
        assert [content(one) for one in sample.controls] == [picture(number)]
    assert len({sample.key for sample in found.samples}) == 4
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("make", [as_parquet, as_tars])
def test_packed_picture_is_read_like_a_file_and_travels_small(make, tmp_path):
    first, second = find_samples([Root(make(tmp_path / "mine"))]).samples[:2]
    assert image_size(first.target) == (32, 32)
    verify_image(first.target)
    assert load_image(first.target, Window.whole((32, 32))).shape == (3, 32, 32)
    again = pickle.loads(pickle.dumps(first))
    assert again == first
    assert hash(again) == hash(first)
    assert len(pickle.dumps(first)) < 2000
    assert content(again.target) == picture(10)
    assert first.target.signature()[0] != second.target.signature()[0] != second.controls[0].signature()[0]
    code = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer).target.read()))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(first), capture_output=True, cwd=ROOT)
    assert int(done.stdout) == len(picture(10))


@pytest.mark.parametrize("form", ["parquet", "save_to_disk", "tars"])
def test_changed_data_set_is_hashed_anew(form, tmp_path):
    import shutil

    root = FORMS[form](tmp_path / "mine")
    before = find_samples([Root(root)]).samples[0].target
    (tmp_path / "hashes").write_text(FileHashes.line(hash_file(before)))
    hashes = FileHashes([tmp_path / "hashes"])
    assert hashes.get(before) is not None
    shutil.rmtree(tmp_path / "mine")
    FORMS[form](tmp_path / "mine")
    assert hashes.get(find_samples([Root(root)]).samples[0].target) is None


@pytest.mark.parametrize("form", [as_saved, as_parquet, as_arrow])
def test_one_data_set_of_two_spellings_has_the_same_pictures(tmp_path, monkeypatch, form):
    root = form(tmp_path / "mine")
    (tmp_path / "link").symlink_to("mine")
    monkeypatch.chdir(tmp_path)
    spelled = [root, root.relative_to(tmp_path), f"link/{root.relative_to(tmp_path / 'mine')}"]
    samples = [find_samples([Root(path)]).samples[1] for path in spelled]
    assert len({one.target for one in samples}) == len({one.controls for one in samples}) == 1
    assert str(samples[2].target) == f"{spelled[2].removesuffix('/.')} row 1 edited_image"


def test_a_slice_is_known_by_its_place_in_a_file_and_not_by_its_name():
    one = Slice("hf://owner/name row 3 image", "/cache/x.arrow", 512, 64)
    assert len({one, Slice("hf://owner/name#train row 3 image", "/cache/x.arrow", 512, 64)}) == 1
    others = [("/cache/y.arrow", 512, 64), ("/cache/x.arrow", 513, 64), ("/cache/x.arrow", 512, 63)]
    assert len({one, *(Slice(one.name, *other) for other in others)}) == 4


def test_roots_of_several_forms_are_mixed(tmp_path):
    make_pairs(tmp_path / "folders", [(32, 32)])
    roots = [as_tars(tmp_path / "tars"), tmp_path / "folders", as_suffixes(tmp_path / "suffixes")]
    samples = find_samples([Root(root) for root in roots]).samples
    assert [sample.root for sample in samples] == [0] * 4 + [1] + [2] * 4
    assert len({sample.key for sample in samples}) == 9


def test_what_systems_leave_is_passed_over_and_counted(tmp_path):
    root = make_pairs(tmp_path, [(32, 32)] * 2)
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "._00.png", "._00.txt"):
        (root / "training_images" / name).write_bytes(b"x")
    (root / "control_images" / "__MACOSX").mkdir()
    found = find_samples([Root(root)])
    assert (len(found.samples), found.incomplete, found.passed_over) == (2, [], 6)


def test_several_data_sets_below_are_named(tmp_path):
    for name in ("a", "b"):
        make_pairs(tmp_path / "all" / name, [(32, 32)])
    with pytest.raises(UserError, match=f"holds 2 data sets, {tmp_path}/all/a, {tmp_path}/all/b: name one"):
        find_samples([Root(tmp_path / "all")])


@pytest.mark.parametrize("url", ["s3://bucket/{000..012}.tar", "https://me:secret@host/pairs.tar", "gs://bucket/x"])
def test_pictures_elsewhere_are_to_be_copied(url):
    with pytest.raises(UserError, match="copy them here first") as error:
        find_samples([Root(url)])
    assert "secret" not in str(error.value)


def test_what_is_no_data_set_is_said(tmp_path):
    with pytest.raises(UserError, match="no pairs found"):
        find_samples([Root(tmp_path)])
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(UserError, match=r"neither a folder nor a .* nor a \.parquet, \.arrow or \.tar file"):
        find_samples([Root(tmp_path / "x.txt")])


def test_library_of_data_sets_is_imported_only_where_it_is_needed(tmp_path):
    make_pairs(tmp_path, [(32, 32)])
    code = (
        "import sys; from datamodules.images.samples import Root; from datamodules.images.sources import find_samples\n"
        "find_samples([Root(sys.argv[1])]); assert not {'datasets', 'pyarrow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)


def test_missing_library_is_a_line_that_says_how_to_install_it(tmp_path, monkeypatch):
    root = as_saved(tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"mine needs the library datasets: pip install 'retouch\[datasets\]'"):
        find_samples([Root(root)])
    assert Path(root).is_dir()
