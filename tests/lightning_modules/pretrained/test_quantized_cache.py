"""Quantized transformers that are kept: the next start has the same bits and quantizes nothing."""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lightning_modules.pretrained import quantized_cache
from lightning_modules.pretrained.assembly import ReadAhead
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.pretrained.weights import Weights
from lightning_modules.quantization.quantization import Quantization
from tests.support.commands import lora_bytes, short
from tests.support.quantized import MODEL

FORMATS = {"fp8": "fp8", "fp4": "fp4", "nf4": "nf4", "double": "nf4", "int8": "int8"}
CPU = torch.device("cpu")


@pytest.fixture
def source(tiny, tmp_path):
    """Makes the source of a tiny transformer that is kept in tmp_path / "cache"."""

    def source(kind="fp8", repository=tiny, skip=("proj_out",), cache=True, backend=None):
        more = kind == "double", "float8_e5m2", cache, str(tmp_path / "cache")
        quantization = Quantization(FORMATS[kind], backend, skip, ["transformer"], *more)
        name = "FluxTransformer2DModel"
        return TransformerSource(name, str(repository), None, torch.bfloat16, quantization, 0)

    return source


@pytest.fixture
def quantized(monkeypatch):
    """The layers that are quantized from now on."""
    layers, quantize = [], Quantization.quantize
    monkeypatch.setattr(Quantization, "quantize", lambda self, one: layers.append(one) or quantize(self, one))
    return layers


def kept(tmp_path):
    return sorted(path for path in (tmp_path / "cache" / "transformers").iterdir() if path.is_dir())


def assert_same(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", FORMATS)
def test_second_start_has_the_same_bits_in_the_memory_of_the_files(source, quantized, tmp_path, kind):
    plain, first = source(kind, cache=False).load(CPU), source(kind).load(CPU)
    assert len(quantized) > 40
    quantized.clear()
    second = source(kind).load(CPU)
    assert not quantized
    assert_same(plain, first)
    assert_same(plain, second)
    [folder] = kept(tmp_path)
    assert str(folder) in Path("/proc/self/maps").read_text()
    assert first.config == second.config == plain.config


def test_what_it_depends_on_has_a_place_of_its_own(source, quantized, tiny, tmp_path):
    """And so has the same transformer elsewhere, but with the same content."""
    source().load(CPU)
    copy = shutil.copytree(tiny, tmp_path / "copy")
    source(repository=copy).load(CPU)
    assert len(kept(tmp_path)) == 1
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for number, one in enumerate((source(repository=copy), source(skip=("proj_out", "x_embedder")), source("int8")), 2):
        quantized.clear()
        one.load(CPU)
        assert quantized
        assert len(kept(tmp_path)) == number


def test_layers_that_cannot_be_written_are_not_kept(source, tmp_path):
    source(backend="quanto").load(CPU)
    assert not (tmp_path / "cache").exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("diffusion_pytorch_model.safetensors", cut),
        ("diffusion_pytorch_model.safetensors", change),
        ("diffusion_pytorch_model.safetensors", os.unlink),
        ("config.json", cut),
        ("manifest.json", cut),
        ("manifest.json", os.unlink),
    ],
)
def test_damaged_one_is_named_and_made_again(source, quantized, tmp_path, caplog, name, damage):
    first = source().load(CPU)
    [folder] = kept(tmp_path)
    damage(folder / name)
    quantized.clear()
    assert_same(source().load(CPU), first)
    assert quantized
    assert f"note: {folder} is not as it was written: the transformer is quantized again" in caplog.messages
    quantized.clear()
    assert_same(source().load(CPU), first)
    assert not quantized


def test_half_written_one_is_not_used_and_goes(source, quantized, tmp_path, monkeypatch):
    source().load(CPU)
    [folder] = kept(tmp_path)
    folder.rename(folder.with_name(f".{folder.name}.1234.tmp"))  # as by a process that was killed
    quantized.clear()
    source().load(CPU)
    assert quantized
    assert kept(tmp_path) == [folder]


@pytest.mark.parametrize("reason", ["read-only", "full", "failing"])
def test_run_goes_on_where_nothing_can_be_kept(source, tmp_path, monkeypatch, caplog, reason):
    def fail(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "cache").mkdir()
    if reason == "read-only":
        (tmp_path / "cache" / "transformers").write_text("")  # root may write everywhere, but not below a file
    elif reason == "full":
        usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
        monkeypatch.setattr(quantized_cache.shutil, "disk_usage", lambda _: usage)
    else:
        monkeypatch.setattr(quantized_cache, "save_quantized", fail)
    assert source().load(CPU) is not None
    [note] = [message for message in caplog.messages if "note" in message]
    assert note.startswith("note: the quantized transformer is not kept")
    left = tmp_path / "cache" / "transformers"
    assert left.is_file() or not kept(tmp_path)


@pytest.mark.slow
def test_runs_with_and_without_it_are_bitwise_the_same(run, tiny, pairs, tmp_path, caplog):
    """The LoRA's header says nothing of it; task=clean frees what other settings left."""
    caplog.set_level(logging.INFO)
    caches = f"data.cache_dir={tmp_path / 'cache'}"
    for name, more in {"first": [], "second": [], "without": ["model.quantization.cache=false"]}.items():
        run("train", *MODEL, *short(tiny, pairs, tmp_path / name, 2), caches, "model.dtype=bfloat16", *more)
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "second") == lora_bytes(tmp_path / "without")
    with safe_open(tmp_path / "first/lora/last/pytorch_lora_weights.safetensors", "pt") as file:
        assert "cache" not in json.dumps(file.metadata())
    [folder] = kept(tmp_path)
    clean = ["task=clean", f"data.root={pairs}", caches, f"model.pretrained_model_name_or_path={tiny}"]
    same = [*MODEL, *clean, "model.dtype=bfloat16", "trainer.accelerator=cpu"]
    assert "nothing to free" in run("predict", *same).text
    other = [*same, "model.quantization.format=nf4", "model.quantization.modules_to_not_convert=[proj_out]"]
    text = run("predict", *other, "delete=true").text
    assert re.search(rf"{folder}  [\d.]+ kB, the transformer of {tiny} in fp8, last used 2", text)
    assert not folder.exists()


class Slow(Weights):
    """Notes what is asked for, and how much is read before it is."""

    def __init__(self, count):
        self.dtypes = {str(number): "F32" for number in range(count)}
        self.read_so_far = []

    def read(self, name):
        if name == "3":
            raise OSError("it cannot be read")
        self.read_so_far.append(name)
        return torch.tensor(float(name))


def test_weights_are_read_ahead_and_errors_come_in_their_place():
    weights = Slow(6)
    ahead = ReadAhead(weights, ["0", "1", "2", "3", "4"])
    assert [float(ahead.read(name)) for name in ("0", "5", "1", "2")] == [0, 5, 1, 2]
    with pytest.raises(OSError, match="cannot be read"):
        ahead.read("3")
    assert float(ahead.read("4")) == 4
    assert sorted(weights.read_so_far) == ["0", "1", "2", "4", "5"]
