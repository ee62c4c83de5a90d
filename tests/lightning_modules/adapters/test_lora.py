"""The adapter and its files."""

from collections import Counter

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.lora import InOneProduct, LoRA
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.lora_files.reading import find_weights
from lightning_modules.lora_files.writing import write
from tests.support.combinations import first
from tests.support.same_adapters import adapter_state
from tests.support.steps import inputs, made
from tests.support.tiny_adapters import gradients

DEFAULTS = dict.fromkeys(("rank_pattern", "alpha_pattern", "lr_pattern", "lora_plus_ratio")) | {
    "use_rslora": False,
    "rank": 4,
    "alpha": None,
    "dropout": 0.0,
    "target_modules": ["to_q"],
    "init_lora_weights": True,
    "init_from": None,
    "seed": 0,
}


def inject(stock, **settings):
    lora = LoRA(**{**DEFAULTS, **settings})
    lora.inject(stock.transformer)
    return lora


def adapted(stock):
    return {name.split(".lora_")[0] for name in trainable(stock.transformer)}


@pytest.mark.parametrize(
    ("target_modules", "count"),
    [(["to_k", "to_q", "to_v", "to_out.0"], 2 * 4 + 2 * 3), (r".*single_transformer_blocks\.1\..*proj_(mlp|out)", 2)],
)
def test_target_modules_as_list_and_as_regular_expression(stock, target_modules, count):
    inject(stock, target_modules=target_modules)
    assert len(adapted(stock)) == count


def test_all_linear_is_every_linear_layer_but_the_output(stock):
    linear = {name for name, module in stock.transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    inject(stock, target_modules="all-linear")
    assert adapted(stock) == linear - {"proj_out"}


def test_initial_weights_are_a_function_of_the_seed(tiny):
    from diffusers import FluxKontextPipeline

    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))  # what happened before must not matter
        stock = FluxKontextPipeline.from_pretrained(tiny)
        inject(stock, seed=seed)
        states.append(safetensors.torch.save(adapter_state(stock.transformer)))
    assert states[0] == states[1] != states[2]


def test_weights_are_found_in_a_run_a_folder_and_a_file(tmp_path):
    folder = tmp_path / "run" / "lora" / "last"
    folder.mkdir(parents=True)
    file = folder / "pytorch_lora_weights.safetensors"
    file.touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "my_lora.safetensors").touch()
    for path in (tmp_path / "run", folder, file):
        assert find_weights(path) == file
    assert find_weights(other) == other / "my_lora.safetensors"
    with pytest.raises(UserError, match=r"contains neither pytorch_lora_weights\.safetensors nor lora/last"):
        find_weights(tmp_path)


def test_starting_weights_of_another_rank_are_refused(stock, tiny, tmp_path):
    from diffusers import FluxKontextPipeline

    lora = inject(stock)
    write(tmp_path / "x.safetensors", lora.deltas(stock.transformer), {})
    for settings, message in (
        ({"rank": 8}, "adapter.rank=8"),
        ({"target_modules": ["to_q", "to_k"]}, "adapts other layers"),
    ):
        with pytest.raises(UserError, match=message):
            inject(FluxKontextPipeline.from_pretrained(tiny), init_from=str(tmp_path / "x.safetensors"), **settings)


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("adapter", ["lora", "tlora", "ortho_tlora"])
@pytest.mark.parametrize("alpha", [4, 6])
def test_update_in_one_product_is_peft_s(tiny, adapter, alpha):
    """The gradient, with the loss, agrees with that of peft's own sum of two products within 1e-6 of its size."""
    module = made(tiny, adapter, "float32", f"adapter.alpha={alpha}")
    found = []
    for variant in (InOneProduct(), None):
        for layer in lora_layers(module.transformer, ADAPTER).values():
            layer.lora_variant = {} if variant is None else {ADAPTER: variant}
        module.transformer.zero_grad()
        loss = module.denoise(*inputs(module)).square().mean()
        loss.backward()
        found.append(torch.cat([loss.detach().view(1), *(one.flatten() for one in gradients(module).values())]))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    assert (found[0] - found[1]).norm() <= 1e-6 * found[1].norm()


@pytest.mark.parametrize("base", first(2, ["fp8", "rotated", "bf16", "nf4"]))
def test_update_is_added_in_place_and_inputs_are_cast_once(tiny, base):
    module = made(tiny, "lora", base)
    layers = lora_layers(module.transformer, ADAPTER)
    with Called() as called, torch.autocast("cpu", torch.bfloat16):
        module.denoise(*inputs(module))
    assert called.counts["aten::addmm_"] == len(layers)
    seen = []
    for layer in layers.values():
        layer.base_layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        layer.lora_A[ADAPTER].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        module.denoise(*inputs(module))
    assert all(one is other for one, other in zip(seen[::2], seen[1::2], strict=True))
    assert {x.dtype for x in seen} == {torch.bfloat16}
