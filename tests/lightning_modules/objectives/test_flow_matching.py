"""The flow-matching objective on a model of two numbers, against its formula written out, gradients included."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate

from datamodules.batch import LatentBatch
from foundation.errors import UserError
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.flow import FlowMatching, TimestepLaw
from tests.support.commands import compose
from tests.support.objectives import EVERYTHING


class TwoNumbers:
    """A model whose velocity is a x_t + b (the mean of the text) + control; its base has other numbers."""

    def __init__(self, a=0.3, b=-0.2):
        self.a, self.b = (torch.tensor(one, requires_grad=True) for one in (a, b))

    def __call__(self, x_t, t, controls, prompt):
        text = prompt["prompt_embeds"].mean(dim=(1, 2)).view(-1, 1, 1, 1)
        return self.a * x_t + self.b * text + controls[0]

    @torch.no_grad()
    def base(self, x_t, t, controls, prompt):
        return TwoNumbers(0.1, 0.5)(x_t, t, controls, prompt).detach()


def normalize(latents):
    return (latents - 0.1) * 2


FLOW = FlowMatching(TimestepLaw("uniform", 0.0, 1.0, None), "sample", 3, normalize, lambda batch: 1.0)


def objective(*overrides):
    return instantiate(compose("train", *overrides).objective, _convert_="all")


def make_batch(samples=3, mask=True, weights=False):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(samples, *shape, generator=generator)

    return LatentBatch(
        keys=[str(number) for number in range(samples)],
        draws=list(range(5, 5 + samples)),
        target_mean=random(2, 4, 4),
        target_std=random(2, 4, 4).abs() / 10,
        controls=[random(2, 4, 4)],
        prompt={"prompt_embeds": random(6, 8)},
        empty_prompt={"prompt_embeds": random(6, 8)[:1]},
        mask=(torch.rand(samples, 1, 32, 32, generator=generator) > 0.5).float() if mask else None,
        weights=torch.tensor([0.5, 1.0, 2.0])[:samples] if weights else None,
        preserve_prompt={"prompt_embeds": random(6, 8)},
    )


def losses(one, batch, model=None, step=0):
    return one.losses(batch, FLOW.noised(batch), model or TwoNumbers(), step)


@pytest.mark.parametrize("mask", [True, False])
def test_everything_at_once_is_the_formula_and_so_are_its_gradients(mask):
    batch, model, mine = make_batch(mask=mask, weights=True), TwoNumbers(), TwoNumbers()
    noised = FLOW.noised(batch)
    one = objective(*EVERYTHING)
    total = losses(one, batch, model)
    total.sum().backward()

    x0, eps, t = noised.x0, noised.eps, noised.t
    x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
    controls = [normalize(batch.controls[0])]
    velocity = mine(x_t, t, controls, batch.prompt)
    with torch.no_grad():
        empty = {"prompt_embeds": batch.empty_prompt["prompt_embeds"].expand(3, -1, -1)}
        unguided = mine(x_t, t, controls, empty)
    error = velocity - (unguided + 2.5 * ((eps - x0) - unguided))
    d = (0.5**t).view(-1, 1, 1, 1)  # the YAML's delta
    error = torch.where(error.abs() <= d, error**2, d * (2 * error.abs() - d)).mean(1, keepdim=True)
    change = (normalize(batch.target_mean) - controls[0]).square().mean(1, keepdim=True)
    ones = F.avg_pool2d(torch.ones_like(change), 3, 1, 1)
    change = (F.avg_pool2d(change, 3, 1, 1) / ones).sqrt()
    region = change / change.amax(dim=(2, 3), keepdim=True)
    weight = 0.2 + 0.8 * region
    if mask:
        region = F.avg_pool2d(batch.mask, 8)
        weight = weight * (0.3 + 0.7 * region)
    loss = (weight * error).sum((1, 2, 3)) / weight.sum((1, 2, 3))
    moved = (velocity - mine.base(x_t, t, controls, batch.prompt)).square().mean(1, keepdim=True)
    loss = loss + 0.7 * (moved * (1 - region)).mean((1, 2, 3))
    kept = (1 - t.view(-1, 1, 1, 1)) * controls[0] + t.view(-1, 1, 1, 1) * eps
    asked = kept, t, controls, batch.preserve_prompt
    loss = loss + 0.4 * (mine(*asked) - mine.base(*asked)).square().mean((1, 2, 3))
    loss = loss * batch.weights
    loss.sum().backward()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(model.a.grad, mine.a.grad)
    torch.testing.assert_close(model.b.grad, mine.b.grad)


def test_contrastive_guidance_leaves_samples_without_their_caption_alone():
    batch = replace(make_batch(mask=False), dropped=[True, False, True])
    noised = FLOW.noised(batch)
    plain, guided = (
        objective(f"objective.contrastive_guidance={scale}").losses(batch, noised, TwoNumbers(), 0) for scale in (1, 3)
    )
    assert torch.isclose(plain, guided).tolist() == batch.dropped


def test_prompts_are_preserved_every_n_steps():
    batch, one = make_batch(), objective('objective.preserve.prompts=["x"]', "objective.preserve.every=3")
    values = [float(losses(one, batch, step=step).detach().sum()) for step in range(4)]
    assert values[0] == values[3] > values[1] == values[2]


def test_a_prompt_without_a_list_is_refused_in_a_line():
    with pytest.raises(Exception, match="objective") as raised:
        objective("objective.preserve.prompts=sky")
    assert 'objective.preserve.prompts=sky: pass a list, as ["sky"]' in str(raised.value.__cause__ or raised.value)


def test_settings_without_effect_or_spoilt_by_dropout_are_refused():
    size = ((64, 64), (64, 64))
    outside = objective("objective.preserve.outside=1")
    outside.check_sizes([(size, ()), (size[:1], ())])
    outside.check_sizes([(size[:1], ("mask",))])
    with pytest.raises(UserError, match=r"objective\.preserve\.outside=1 preserves .* no sample has a mask"):
        outside.check_sizes([(size[:1], ())])
    adapter = instantiate(compose("train", "adapter.dropout=0.1").adapter, _convert_="all")
    for one, name in (("objective.contrastive_guidance=2", r"contrastive_guidance"), ("objective=dpo", "dpo")):
        with pytest.raises(UserError, match=rf"adapter\.dropout=0\.1: objective[.=]{name}"):
            objective(one).check_model(FluxKontext, adapter)
    objective("objective.preserve.outside=1").check_model(FluxKontext, adapter)
    full = instantiate(compose("train", "adapter=full").adapter, _convert_="all")
    with pytest.raises(UserError, match="adapter=full changes the base"):
        objective("objective=dpo").check_model(FluxKontext, full)


def test_rejected_images_without_dpo_are_noted(caplog):
    caplog.set_level("INFO", "retouch")
    objective().check_sizes([(((64, 64), (64, 64)), ("rejected",))])
    [note] = caplog.messages
    assert note.startswith("note: samples have rejected images, which objective=dpo learns from")
