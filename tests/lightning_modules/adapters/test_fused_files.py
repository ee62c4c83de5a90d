"""Transformers with a LoRA in their weights as single files, by the names of their authors."""

import pytest
import safetensors.torch
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from hydra.utils import instantiate
from torch import nn

from foundation.errors import UserError
from lightning_modules.adapters.fusing import fuse_to_file, write_fused
from lightning_modules.lora_files.delta import LowRank
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.foreign_files import native_state
from tests.support.lora_files import random_delta
from tests.support.tiny_pipelines import DIFFERENT

CPU = torch.device("cpu")
# Transformers whose real sizes diffusers' converters contain, or that they do not know.
OF_ONE_SIZE = ("FluxTransformer2DModel", "LongCatImageTransformer2DModel")


def source_of(model, repository, transformer=None, dtype="bfloat16"):
    settings = [f"model={model}", f"model.dtype={dtype}", f"model.transformer_name_or_path={transformer or repository}"]
    module = instantiate(compose("predict", *settings).model, pretrained_model_name_or_path=str(repository))
    return module.base.source


def updates_of(transformer):
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    return {name: random_delta(layer, 2, seed, False, 0.3) for seed, (name, layer) in enumerate(layers.items())}


@pytest.mark.parametrize("model", first(3, DIFFERENT))
def test_a_file_has_the_fused_weights_by_the_authors_names(repositories, tmp_path, model):
    source = source_of(model, repositories[model])
    updates = updates_of(source.meta)
    write_fused(source, updates, tmp_path / "folder", CPU)
    fused = {}
    for file in (tmp_path / "folder").glob("*.safetensors"):
        fused |= safetensors.torch.load_file(file)

    path = tmp_path / "fused.safetensors"
    rounding = fuse_to_file(source, updates, path, CPU)
    assert 0 < rounding.share < 0.01
    state = safetensors.torch.load_file(path)
    assert path.read_bytes() == safetensors.torch.save(state, {"format": "pt"}), "as safetensors writes it"

    read = source_of(model, repositories[model], path).weights()
    assert read.dtypes.keys() == fused.keys()
    assert all(torch.equal(read.read(name), one) for name, one in fused.items())

    marks = {name for name, setting in source.native.marks.items() if source.meta.config[setting]}
    assert all(state.pop(mark).shape == (0,) for mark in marks)
    expected = native_state(fused, source.meta, source.native)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    if source.class_name not in OF_ONE_SIZE:
        converted = SINGLE_FILE_LOADABLE_CLASSES[source.class_name]["checkpoint_mapping_fn"](dict(state))
        torch.testing.assert_close(converted, fused, rtol=0, atol=0)


def test_a_base_in_8_bits_without_scales_is_written_unquantized(tiny, tmp_path):
    """Such files have norms and biases in 8 bits as well."""
    meta, native = source_of("flux_kontext", tiny).meta, source_of("flux_kontext", tiny).native
    [file] = (tiny / "transformer").glob("*.safetensors")
    state = {name: one.to(torch.float8_e4m3fn) for name, one in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(native_state(state, meta, native), tmp_path / "base.safetensors")
    source = source_of("flux_kontext", tiny, tmp_path / "base.safetensors")
    updates = dict(list(updates_of(meta).items())[::2])
    fuse_to_file(source, updates, tmp_path / "fused.safetensors", CPU)
    written = source_of("flux_kontext", tiny, tmp_path / "fused.safetensors").weights()
    for name, tensor in state.items():
        wanted, update = tensor.float(), updates.get(name.removesuffix(".weight"))
        if update is not None and name.endswith(".weight"):
            wanted = wanted + update.up @ update.down
        assert torch.equal(written.read(name), wanted.bfloat16()), name


def test_a_file_that_cannot_be_written_leaves_the_older_one(tiny, tmp_path):
    source = source_of("flux_kontext", tiny)
    path = tmp_path / "fused.safetensors"
    path.write_text("older")
    last = "transformer_blocks.1.norm1_context.linear"
    rows, columns = source.meta.get_submodule(last).weight.shape
    updates = {last: LowRank(torch.full((1, columns), 1e30), torch.full((rows, 1), 1e30))}
    with pytest.raises(UserError, match="exceed the range of bfloat16"):
        fuse_to_file(source, updates, path, CPU)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
