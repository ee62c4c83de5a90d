"""Tars of images: what their members are, and what is wrong with them."""

import gzip
import io
import json
import tarfile

import pytest

from datamodules.images.samples import Root
from datamodules.images.sources import find_captioned, find_samples
from foundation.errors import UserError
from tests.support.stored import picture, tar_members, write_tar


def test_masks_references_and_captions(tmp_path):
    members = tar_members([0])
    del members["0000.txt"]
    members |= {"0000.source_2.jpg": picture(1, "JPEG"), "0000.mask.png": picture(2)}
    members["0000.json"] = json.dumps({"caption": ["a", "b"], "url": "http://x", "source": "there", "n": 3}).encode()
    members |= {name.replace("0000", "0001"): content for name, content in tar_members([0]).items()}
    members["0001.txt"] = b"one\n\ntwo\n"
    one, two = find_samples([Root(write_tar(tmp_path / "x.tar", members))]).samples
    assert one.prompts == ("a", "b")
    assert [str(picture).partition(":")[2] for picture in one.controls] == ["0000.source.png", "0000.source_2.jpg"]
    assert one.mask.read_bytes() == picture(2)
    assert (len(two.controls), two.mask) == (1, None)


def test_images_with_captions(tmp_path):
    members = {"a/1.jpg": picture(0, "JPEG"), "a/1.txt": b"a cup", "b/1.JPG": picture(1, "JPEG")}
    members |= {"b/1.json": b'{"caption": "a cat", "image": "x.jpg"}', "c.png": picture(2)}
    found = find_captioned([Root(write_tar(tmp_path / "x.tar", members))], "sks")
    assert [(one.key, one.prompts) for one in found.samples] == [
        ("a/1", ("a cup",)),
        ("b/1", ("a cat",)),
        ("c", ("sks",)),
    ]


def test_folder_of_tars_and_one_key_in_two(tmp_path):
    for name in ("000", "001"):
        write_tar(tmp_path / f"{name}.tar", tar_members([7]))
    (tmp_path / "000.parquet").write_bytes(b"what img2dataset knows of its pictures")
    assert [one.key for one in find_samples([Root(tmp_path)]).samples] == ["000/0007", "001/0007"]


def test_tar_of_the_braces_that_is_missing_is_named(tmp_path):
    write_tar(tmp_path / "000.tar", tar_members([0]))
    with pytest.raises(UserError, match=r"no such file: .*001\.tar, .*002\.tar"):
        find_samples([Root(f"{tmp_path}/{{000..002}}.tar")])
    with pytest.raises(UserError, match="a brace is left open"):
        find_samples([Root(f"{tmp_path}/{{000..002.tar")])


def test_tar_cut_anywhere_yields_the_samples_before_the_cut_and_a_line(tmp_path):
    tar = write_tar(tmp_path / "x.tar", tar_members(range(3)))
    whole = find_samples([Root(tar)]).samples
    content = tar.read_bytes()
    with tarfile.open(tar) as file:
        members = file.getmembers()
    last = members[-1].offset_data + 512
    for end in {*range(0, last, 701), *(member.offset for member in members), *(one.offset + 512 for one in members)}:
        tar.write_bytes(content[:end])
        try:
            found = find_samples([Root(tar)])
        except UserError:
            assert end < members[3].offset, "not even one sample is left"
            continue
        assert [one.key for one in found.samples] == [one.key for one in whole[: len(found.samples)]]
        assert "ends early" in found.incomplete[0]


def test_zeroed_header_in_the_middle_is_noted(tmp_path):
    tar = write_tar(tmp_path / "x.tar", tar_members(range(3)))
    content = bytearray(tar.read_bytes())
    with tarfile.open(tar) as whole:
        start = whole.getmembers()[3].offset
    content[start : start + 512] = b"x" * 512
    tar.write_bytes(content)
    found = find_samples([Root(tar)])
    assert [one.key for one in found.samples] == ["0000"]
    assert "damaged after 0000.txt" in found.incomplete[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "is empty or no tar"),
        ("gzip", r"is compressed, .* repack it as a plain \.tar"),
        ("no images", "no usable images"),
        ("folder", "no pairs found"),
    ],
)
def test_unusable_tar_is_a_line(tmp_path, kind, message):
    path = write_tar(tmp_path / "x.tar", {"a.txt": b"x"})
    if kind == "text":
        path.write_bytes(b"nothing " * 999)
    elif kind == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    with pytest.raises(UserError, match=message) as error:
        find_samples([Root(path)])
    assert "\n" not in str(error.value)


def test_members_in_doubt_are_incomplete_and_those_of_systems_are_passed_over(tmp_path):
    members = {"./" + name: content for name, content in tar_members([0, 1, 3, 4, 5, 6]).items()}
    members |= {"0002.source.heic": b"x", "0002.txt": b"x", "README.txt": b"about", "0001.json": b"{broken"}
    members |= {"0005.target.PNG": picture(4), "0006.caption": b"another caption"}
    members |= {"./._0004.source.png": b"x", "__MACOSX/0004.source.png": b"x", "./Thumbs.db": b"x"}
    tar = write_tar(tmp_path / "x.tar", members)
    with tarfile.open(tar, "a") as file:
        again = tarfile.TarInfo("0000.txt")
        again.size = 1
        file.addfile(again, io.BytesIO(b"x"))
        file.addfile(again, io.BytesIO(b"x"))
        link = tarfile.TarInfo("0003.mask.png")
        link.type, link.linkname = tarfile.LNKTYPE, "0000.source.png"
        file.addfile(link)
    found = find_samples([Root(tar)])
    assert [one.key for one in found.samples] == ["0004"]
    assert len(found.incomplete) == 6
    for message in (
        "0001.json is not JSON",
        "0000.txt is there twice",
        "0003.mask.png is a link",
        "0002.source.heic has an unsupported format",
        f"0005.target.PNG and {tar}:0005.target.png are both its target: keep one",
        "hold different captions of one image",
    ):
        assert any(message in line for line in found.incomplete), message
