"""What is written, by diffusers' own loaders: of today's families and of those to come."""

import diffusers
import pytest
import safetensors.torch
import torch
from diffusers.loaders import lora_pipeline
from torch import nn

from datamodules.errors import UserError
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.programs import check_with_diffusers, loader_of
from lightning_modules.lora_files.writing import write
from tests.support.commands import short
from tests.support.foreign_files import flux, qwen

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
LAYERS = {"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32}
TRANSFORMERS = {
    "FluxPipeline": flux,
    "QwenImagePipeline": qwen,
    "Flux2Pipeline": lambda: diffusers.Flux2Transformer2DModel(
        in_channels=16, **LAYERS, **HEADS, axes_dims_rope=(4, 4, 4, 4)
    ),
    "Flux3Pipeline": lambda: diffusers.Flux3Transformer2DModel(
        in_channels=16, cond_in_channels=16, **LAYERS, **HEADS, axes_dims_rope=(4, 4, 4, 4)
    ),
    "ZImagePipeline": lambda: diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
        axes_dims=[4, 6, 6], axes_lens=[16, 16, 16],
    ),
    "Krea2Pipeline": lambda: diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, **HEADS, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=32,
        text_hidden_dim=32, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
    ),
}  # fmt: skip


def on_meta(name):
    with torch.device("meta"):
        return TRANSFORMERS[name]()


def updates_of(transformer, chosen):
    """Random ones of an adapter of rank 2, its scale in the up projections."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: LowRank(
            torch.randn(2, module.in_features, generator=generator),
            torch.randn(module.out_features, 2, generator=generator) * 1.5,
        )
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and (chosen is None or name.endswith(chosen))
    }


@pytest.mark.parametrize("chosen", [None, ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_stock_loaders_take_our_files_as_they_are(tmp_path, name, chosen):
    transformer = on_meta(name)
    updates = updates_of(transformer, chosen)
    assert len(updates) > 3
    write(tmp_path / "x.safetensors", updates, {"adapter": {"rank": 2}})
    check_with_diffusers(tmp_path / "x.safetensors", updates, name, transformer)


@pytest.mark.parametrize("name", ["Flux2Pipeline", "Flux3Pipeline", "Krea2Pipeline", "ZImagePipeline"])
def test_alpha_beside_the_layers_is_what_their_loaders_refuse(tmp_path, name):
    transformer = on_meta(name)
    updates = updates_of(transformer, ("to_q",))
    write(tmp_path / "x.safetensors", updates, {})
    state = safetensors.torch.load_file(tmp_path / "x.safetensors")
    state |= {f"transformer.{layer}.alpha": torch.tensor(2.0) for layer in updates}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(
        UserError, match=r"x.safetensors (is written, but diffusers' .* cannot load it|read it wrongly)"
    ):
        check_with_diffusers(tmp_path / "x.safetensors", updates, name, transformer)


def test_a_layer_that_diffusers_leaves_out_or_changes_is_named(tmp_path):
    transformer = on_meta("FluxPipeline")
    updates = updates_of(transformer, ("to_q", "to_k"))
    write(tmp_path / "x.safetensors", updates, {})
    first, second, *_ = updates
    missing = dict(updates)
    del missing[first]
    for expected, name in ((missing, first), (updates | {second: updates[second].scaled(2)}, second)):
        with pytest.raises(UserError, match=rf"x.safetensors: diffusers read it wrongly: {name} differ from the file"):
            check_with_diffusers(tmp_path / "x.safetensors", expected, "FluxPipeline", transformer)


def test_rounding_of_an_update_that_cancels_is_no_mistake(tmp_path):
    """After few steps of Adam all numbers of a half are alike, and what its rank's rows give may add up to little."""
    transformer = flux().bfloat16()
    updates = updates_of(transformer, ("to_v",))
    for name, update in updates.items():
        x = torch.randn(update.down.shape[1])
        down = torch.stack([update.down[0], x * 1e-3 - update.down[0]])
        down[1] -= x * (down.sum(0) @ x) / (x @ x) * 0.999
        updates[name] = LowRank(down, torch.full_like(update.up, 0.015))
    write(tmp_path / "x.safetensors", updates, {})
    check_with_diffusers(tmp_path / "x.safetensors", updates, "FluxPipeline", transformer)
    doubled = {name: one.scaled(2) for name, one in updates.items()}
    with pytest.raises(UserError, match="read it wrongly"):
        check_with_diffusers(tmp_path / "x.safetensors", doubled, "FluxPipeline", transformer)


def test_the_first_checkpoint_of_a_run_is_read_back(run, tiny, pairs, tmp_path, monkeypatch):
    made = []
    load = lora_pipeline.FluxLoraLoaderMixin.load_lora_weights
    monkeypatch.setattr(
        lora_pipeline.FluxLoraLoaderMixin,
        "load_lora_weights",
        lambda self, *a, **k: made.append(a) or load(self, *a, **k),
    )
    run("train", *short(tiny, pairs, tmp_path / "run", 3), "save_every=1")
    assert len(made) == 1


def test_a_failed_check_keeps_the_weights(run, tiny, pairs, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("unexpected keys: a.b\nand more")

    monkeypatch.setattr(lora_pipeline.FluxLoraLoaderMixin, "load_lora_weights", refuse)
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 2), ok=False)
    assert "is written, but diffusers' FluxKontextPipeline cannot load it: unexpected keys: a.b" in outcome.error
    assert (tmp_path / "run/lora/last/pytorch_lora_weights.safetensors").is_file()
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()


NAMES = [name for name in dir(diffusers) if name.startswith(("Flux", "Qwen", "ZImage", "Krea2", "LongCat", "Ideogram"))]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.endswith("Pipeline") and "Modular" not in name and "Redux" not in name]
)
def test_the_loader_of_a_pipeline_is_the_one_that_it_has(name):
    mixins = [base for base in getattr(diffusers, name).__mro__ if base.__name__.endswith("LoraLoaderMixin")]
    assert loader_of(name) is (mixins[0] if mixins else None)


def test_a_transformer_without_a_pipelines_loader_has_its_own(tmp_path):
    transformer = on_meta("QwenImagePipeline")
    updates = updates_of(transformer, ("to_q",))
    write(tmp_path / "x.safetensors", updates, {})
    check_with_diffusers(tmp_path / "x.safetensors", updates, "Other", transformer)
    more = updates | {"x": next(iter(updates.values()))}
    with pytest.raises(UserError, match="read it wrongly"):
        check_with_diffusers(tmp_path / "x.safetensors", more, "Other", transformer)
