"""Files that are something else than their names say."""

import io
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from foundation.errors import UserError
from foundation.files import PICKLE, kind_of_file, read_bytes, reading, replacing
from foundation.locks import holder, in_use, open_own


def pickled(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("lora.safetensors", b"x")
    return buffer.getvalue()


KINDS = {
    "pickle": (pickled(legacy=False), PICKLE),
    "older pickle": (pickled(legacy=True), PICKLE),
    "zip": (zipped(), "a zip archive"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF file"),
    "page": (b"\n<!DOCTYPE HTML>\n<html><title>Sign in</title>", "a web page (HTML)"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer"),
    "error": (b'{"error":"Unauthorized"}', "a JSON text"),
    "compressed": (b"\x1f\x8b\x08" + bytes(9), "a compressed archive"),
    "zeros": (bytes(4096), "a file of zeros"),
    "nothing": (b"", "an empty file"),
}


@pytest.mark.parametrize("content", KINDS)
def test_a_file_of_another_kind_is_identified_and_not_called_damaged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_bytes(KINDS[content][0])
    found = kind_of_file(path)
    assert found is not None
    assert found.startswith(KINDS[content][1])
    with pytest.raises(UserError) as raised, reading(path, "download it again"):
        safetensors.torch.load_file(path)
    assert str(raised.value).startswith(f"{path} is {KINDS[content][1]}")
    assert "damaged" not in str(raised.value)


@pytest.mark.parametrize("length", [0x28, 0x800280])  # the first bytes of pickles
def test_safetensors_are_recognised_with_any_length_of_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a":')
    assert kind_of_file(path) is None
    with pytest.raises(UserError, match="is damaged"), reading(path, "download it again"):
        safetensors.torch.load_file(path)


def test_threads_that_replace_one_file_lose_none_of_its_contents(tmp_path):
    """The temporary name of a process was that of all its threads, which removed each other's file."""

    def save(number):
        with replacing(tmp_path / "caption.txt") as temporary:
            temporary.write_text(str(number) * 1000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(160)))
    text = (tmp_path / "caption.txt").read_text()
    assert text == text[0] * len(text) or len({*text}) <= 3
    assert os.listdir(tmp_path) == ["caption.txt"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "caption.txt"
    path.write_text("old")
    path.chmod(mode)
    with replacing(path) as temporary:
        assert temporary.stat().st_mode & 0o777 == 0o600, "nor does anybody read it while it is written"
        temporary.write_text("new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)
    with replacing(path, private=True) as temporary:
        temporary.write_text("secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_another_process_reads_is_replaced_as_soon_as_windows_permits_it(tmp_path, monkeypatch):
    replace, refusals = os.replace, [PermissionError(13, "it is open")] * 2

    def refuse(*paths):
        if refusals:
            raise refusals.pop()
        replace(*paths)

    monkeypatch.setattr(os, "replace", refuse)
    with replacing(tmp_path / "table.csv") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "table.csv").read_text() == "new"


def test_a_file_is_read_up_to_a_size_and_a_device_not_at_all(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bytes(tmp_path / "x", 4)
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a pipe or a device"):
        read_bytes(tmp_path / "zero")


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_foreign_lock_file_is_neither_written_nor_waited_for(tmp_path, kind):
    """A link in a run from elsewhere would have emptied the file that it names."""
    victim, lock = tmp_path / "victim", tmp_path / "run/.lock"
    lock.parent.mkdir()
    victim.write_text("mine") if kind == "link" else None
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(victim)
    for use in (lambda: open_own(lock), lambda: in_use(lock.parent).__enter__()):
        with pytest.raises(UserError, match="is a link or a pipe, not a file of ours"):
            use()
    assert holder(lock.parent) is None
    assert victim.exists() == (kind == "link")
    assert kind != "link" or victim.read_text() == "mine"
