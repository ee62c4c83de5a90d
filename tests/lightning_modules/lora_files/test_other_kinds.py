"""Files of LoKr and LoHa as LyCORIS, peft and trainers of FLUX's own layers write them, against dense matrices."""

import copy

import pytest
import safetensors.torch
import torch
from peft import LoHaConfig, LoKrConfig, OFTConfig, get_peft_model

from foundation.errors import UserError
from lightning_modules.adapters.factored import add_deltas
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import encode, write
from tests.support.foreign_files import FLUX, flux, velocity
from tests.support.lora_files import layer_names

FUSED = "double_blocks.0.img_attn.qkv"
LAYERS = FLUX[FUSED]
ALPHA = 3.0


@pytest.fixture(scope="module")
def base():
    return flux()


@pytest.fixture(scope="module")
def names(base):
    return layer_names("flux_kontext", base)


def numbers(*shape, seed=0):
    return 0.4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lokr(out, wide, factor, ranks, rows=None):
    """Tensors of a layer and the matrix that LyCORIS makes of them (lycoris/modules/lokr.py)."""
    rows = rows or out // factor
    shapes = {"w1": (out // rows, factor), "w2": (rows, wide // factor)}
    tensors, whole = {}, {}
    for number, (name, (rows, columns)) in enumerate(shapes.items()):
        rank = ranks[number]
        if rank is None:
            tensors[f"lokr_{name}"] = whole[name] = numbers(rows, columns, seed=number)
        else:
            a, b = numbers(rows, rank, seed=number), numbers(rank, columns, seed=number + 7)
            tensors |= {f"lokr_{name}_a": a, f"lokr_{name}_b": b}
            whole[name] = a @ b
    rank = ranks[1] or ranks[0]
    scale = 1.0 if rank is None else ALPHA / rank
    return tensors | {"alpha": torch.tensor(ALPHA)}, scale * torch.kron(whole["w1"], whole["w2"])


def loha(out, wide):
    one, other = ((numbers(out, 3, seed=n), numbers(3, wide, seed=n + 1)) for n in (0, 5))
    keys = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    tensors = dict(zip(keys, (*one, *other), strict=True)) | {"alpha": torch.tensor(ALPHA)}
    return tensors, ALPHA / 3 * (one[0] @ one[1]) * (other[0] @ other[1])


def dense_sum(base, deltas):
    found = copy.deepcopy(base)
    for layer, delta in deltas.items():
        found.get_submodule(layer).weight += delta
    return velocity(found)


def with_file(base, names, path):
    found = copy.deepcopy(base)
    add_deltas(found, "x", LoRAFile(path).read(names, "tiny"))
    return velocity(found)


KINDS = {
    "low rank": lambda out, wide: lokr(out, wide, 4, (None, 2)),
    "whole, where alpha says nothing": lambda out, wide: lokr(out, wide, 8, (None, None)),
    "both of low rank": lambda out, wide: lokr(out, wide, 8, (2, 4)),
    "LoHa": loha,
}


@pytest.mark.parametrize(
    ("kind", "prefix"), zip(KINDS, ["lycoris_", "transformer.", "diffusion_model.", ""], strict=True)
)
def test_files_of_lycoris_are_dense_matrices(base, names, tmp_path, kind, prefix):
    state, deltas = {}, {}
    for layer in (*LAYERS, "transformer_blocks.0.ff_context.net.0.proj"):
        module = base.get_submodule(layer)
        tensors, deltas[layer] = KINDS[kind](module.out_features, module.in_features)
        named = prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)
        state |= {f"{named}.{part}": tensor for part, tensor in tensors.items()}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    wanted = dense_sum(base, deltas)
    torch.testing.assert_close(with_file(base, names, tmp_path / "x.safetensors"), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, velocity(base), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("kind", "rows"), [("LoKr", 16), ("LoKr", None), ("LoHa", None)])
def test_layers_that_are_one_in_a_file_get_its_rows(base, names, tmp_path, kind, rows):
    """A layer whose rows begin between those of w2 is a Kronecker product again; one that begins within is not."""
    groups = {name: FLUX[name] for name in (FUSED, "single_blocks.0.linear1", "final_layer.adaLN_modulation.1")}
    state, deltas = {}, {}
    for native, layers in groups.items():
        modules = [base.get_submodule(layer) for layer in layers]
        out, wide = sum(module.out_features for module in modules), modules[0].in_features
        tensors, delta = lokr(out, wide, 4, (None, None), rows) if kind == "LoKr" else loha(out, wide)
        state |= {f"lora_unet_{native.replace('.', '_')}.{part}": tensor for part, tensor in tensors.items()}
        if native.startswith("final"):  # shift and scale stand the other way round
            delta = torch.cat(delta.chunk(2)[::-1])
        deltas |= dict(zip(layers, delta.split([module.out_features for module in modules]), strict=True))
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    torch.testing.assert_close(
        with_file(base, names, tmp_path / "x.safetensors"), dense_sum(base, deltas), rtol=1e-4, atol=1e-5
    )
    updates = LoRAFile(tmp_path / "x.safetensors").read(names, "tiny")
    if kind == "LoKr" and rows is None:
        with pytest.raises(UserError, match="some rows of a Kronecker product are not a Kronecker product"):
            encode(updates, "diffusers", names)
    else:
        write(tmp_path / "again.safetensors", updates, {})
        again = with_file(base, names, tmp_path / "again.safetensors")
        torch.testing.assert_close(again, dense_sum(base, deltas), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        LoKrConfig(r=4, alpha=6, decompose_factor=4),
        LoKrConfig(r=64, alpha=32, decompose_factor=4, init_weights=False),
        LoHaConfig(r=4, alpha=6),
    ],
    ids=["LoKr", "LoKr of whole factors", "LoHa"],
)
def test_folders_of_peft_are_what_peft_computes(base, names, tmp_path, config):
    """peft's scales apply to whole factors as well."""
    config.target_modules = LAYERS
    theirs = get_peft_model(copy.deepcopy(base), config)
    for number, parameter in enumerate(theirs.parameters()):
        if parameter.requires_grad:
            parameter.data = numbers(*parameter.shape, seed=number)
    theirs.save_pretrained(tmp_path)
    found = with_file(base, names, tmp_path / "adapter_model.safetensors")
    torch.testing.assert_close(found, velocity(theirs.base_model.model), rtol=1e-4, atol=1e-5)


def test_an_oft_is_refused_by_name(base, names, tmp_path):
    theirs = get_peft_model(copy.deepcopy(base), OFTConfig(r=0, oft_block_size=8, target_modules=LAYERS))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="was saved by peft with peft_type=OFT, which Retouch does not read"):
        LoRAFile(tmp_path / "adapter_model.safetensors").read(names, "tiny")
