"""The work of a step against torch's own counter."""

import pytest
from hydra.utils import instantiate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_modules.estimation.flops import Tokens
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.steps import family, inputs
from tests.support.tiny_adapters import build, learn
from tests.support.tiny_adapters import velocity as of
from tests.support.tiny_pipelines import every_model


def counted(module, *arguments):
    """Forward, and forward and backward; attention as products, which the counter knows."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        velocity = module.denoise(*arguments)
        forward = counter.get_total_flops()
        velocity.square().mean().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("targets", first(1, ["all-linear", "[to_q,to_k,to_v,to_out.0]"]))
@every_model
def test_counts_are_those_of_torch(repositories, model, targets):
    settings = [f"adapter.target_modules={targets}", "model.gradient_checkpointing=none"]
    module = family(repositories, model, *settings)
    x_t, t, controls, prompt = inputs(module, samples=1, width=16, text=32)  # 32 tokens each, which nobody pads
    prompt.pop("prompt_embeds_mask", None)
    flops = module.step_flops
    tokens = Tokens(32, 32, 16 * len(controls))
    forward, both = counted(module, x_t, t, controls, prompt)
    assert flops.forward(tokens) == forward
    assert flops.of_sample(tokens) == both


def test_full_fine_tuning_counts_its_weight_gradients(repositories):
    path = f"model.pretrained_model_name_or_path={repositories['flux_kontext']}"
    configs = (compose("train", "model=flux_kontext", path, f"adapter={adapter}") for adapter in ("lora", "full"))
    lora, full = (instantiate(cfg.model, _convert_="all").step_flops for cfg in configs)
    tokens = Tokens(16, 4096, 4096)
    assert full.forward(tokens) < lora.forward(tokens)
    # A weight gradient for each product but those of attention, and no input gradient of the very first.
    linear = sum(p.forward(tokens) for p in full.products if p.keys is None)
    first = sum(p.forward(tokens) for p in full.products if not p.input_gradient)
    attention = sum(p.forward(tokens) for p in full.products if p.keys is not None)
    assert full.of_sample(tokens) == 3 * linear - first + 3 * attention


def test_the_dial_computes_again_what_it_says(tiny):
    """`full` recomputes a forward pass, `every_2` half of one, `selective` none of the large products."""
    work = {}
    for position in ("none", "selective", "every_2", "full"):
        module = build(tiny, "lora", f"model.gradient_checkpointing={position}")
        learn(module)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = of(module, [0.2, 0.7]).square().mean()
            forward = counter.get_total_flops()
            loss.backward()
        work[position] = (counter.get_total_flops() - forward) / forward
    again = {position: share - work["none"] for position, share in work.items()}
    assert 0 < again["selective"] < 0.25 * again["full"]
    assert 0.3 < again["every_2"] / again["full"] < 0.7
    assert 0.8 < again["full"] < 1
