"""Files that are something else than their names say."""

import io
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from datamodules.errors import UserError
from datamodules.files import PICKLE, kind_of_file, reading


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
def test_a_file_of_another_kind_is_named_for_what_it_is_and_not_called_damaged(tmp_path: Path, content: str) -> None:
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
def test_safetensors_are_known_whatever_the_length_of_their_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "lora.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a":')
    assert kind_of_file(path) is None
    with pytest.raises(UserError, match="is damaged"), reading(path, "download it again"):
        safetensors.torch.load_file(path)
