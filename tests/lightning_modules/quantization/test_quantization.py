"""The choice of quantized layers, the time of quantization, and memory."""

import bitsandbytes
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from foundation.errors import UserError
from tests.support.commands import ROOT, class_of, compose
from tests.support.quantized import load, quantization

FP8 = OmegaConf.load(ROOT / "conf/model/quantization/fp8.yaml")
FUSION = [*(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_gate", "to_out.0")), "ff.gate", "ff.up", "ff.down"]
KEPT = {
    "flux_kontext": {"x_embedder", "context_embedder", "proj_out", "norm_out.linear"}
    | {f"transformer_blocks.{i}.{norm}.linear" for i in range(2) for norm in ("norm1", "norm1_context")}
    | {f"single_transformer_blocks.{i}.norm.linear" for i in range(2)},
    "qwen_image_edit": {"img_in", "txt_in", "proj_out", "norm_out.linear"}
    | {f"transformer_blocks.{i}.{part}_mod.1" for i in range(2) for part in ("img", "txt")},
    "z_image": {"all_x_embedder.2-1", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"}
    | {"all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"}
    | {f"{block}.adaLN_modulation.0" for block in ("noise_refiner.0", "layers.0", "layers.1")},
    "krea2": {"img_in", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj", "txt_in.linear_1"}
    | {"txt_in.linear_2", "final_layer.linear", "text_fusion.projector"}
    | {f"text_fusion.{blocks}.0.{layer}" for blocks in ("layerwise_blocks", "refiner_blocks") for layer in FUSION},
}


@pytest.mark.parametrize("model", KEPT)
def test_embedders_modulation_and_output_stay_as_they_are(repositories, model):
    transformer = load(repositories[model], class_of(model).transformer_class, torch.float32)
    linears = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    size = instantiate(FP8).nbytes(transformer, torch.float32)
    transformer = load(repositories[model], class_of(model).transformer_class, torch.float32, instantiate(FP8))
    kept = {name for name in linears if type(transformer.get_submodule(name)) is nn.Linear}
    assert {name for name in kept if not name.startswith("time_text_embed")} == KEPT[model]
    blocks = {name for name in linears if ".attn." in name or ".attention." in name}
    assert linears - kept >= {name for name in blocks if not name.startswith("text_fusion.")}
    scales = sum(transformer.get_submodule(name).weight_scale.nbytes for name in linears - kept)
    assert sum(tensor.nbytes for tensor in transformer.state_dict().values()) == size + scales


def test_list_of_unquantized_layers_can_be_changed(tiny):
    transformer = load(tiny, quantization=quantization("int8_w8a8", skip=["transformer_blocks.*"]))
    assert type(transformer.proj_out) is not nn.Linear
    assert type(transformer.transformer_blocks[0].attn.to_q) is nn.Linear
    with pytest.raises(UserError, match="leaves no linear layer"):
        quantization("int8_w8a8", skip=["*"]).check(transformer)


def test_a_device_that_cannot_do_it_is_named(monkeypatch):
    def no_kernel(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", no_kernel)
    with pytest.raises(UserError, match=r"nf4 does not run on cpu here: no kernel image is available$"):
        quantization("nf4").quantize(nn.Linear(64, 64))


def test_fp4_starts_slower():
    for model, more, expected in (
        ("flux_kontext_fp4", ["optimizer=adamw_8bit"], (2e-5, 100)),
        ("qwen_image", ["model/quantization=nf4"], (1e-4, 0)),
        ("flux_kontext_fp4", ["optimizer=prodigy"], (1.0, 100)),
    ):
        cfg = compose("train", f"model={model}", *more)
        assert (cfg.optimizer.lr, cfg.scheduler.num_warmup_steps) == expected
        assert cfg.trainer.gradient_clip_val == 1.0
