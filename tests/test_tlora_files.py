"""T-LoRA files in stock pipelines: with their ranks, beside plain ones, by the docs' lines."""

import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from lightning_modules.adapters.gates import attach_rank_schedule
from tests.support.combinations import first
from tests.support.commands import ROOT, compose
from tests.support.pictures import pixels
from tests.support.stock_pictures import same_request, stock_picture
from tests.support.tiny_pipelines import DIFFERENT, every_model


@pytest.mark.parametrize(("model", "adapter"), first(1, zip(reversed(DIFFERENT), cycle(["ortho_tlora", "tlora"]))))
def test_stock_pipeline_with_the_schedule_creates_the_image_of_predict(
    run, arguments, repositories, datasets, tmp_path, monkeypatch, model, adapter
):
    """Both passes of true CFG have the same mask; without the schedule the full rank is used."""
    settings = [f"adapter={adapter}", "adapter.alpha=7", "adapter.target_modules=all-linear", "optimizer.lr=3e-2"]
    run("train", *arguments(model, tmp_path / "run", 6, *settings, "data.batch_size=2"))
    monkeypatch.chdir(tmp_path)
    call, request = same_request(model, datasets[model])
    run("predict", f"lora={tmp_path / 'run'}", "prompt=make it snow", "output_dir=out", *request)
    (picture,) = (tmp_path / "out").glob("*.png")
    lora = tmp_path / "run" / "lora" / "last"
    if model == "qwen_image_2_1":  # a cache would keep what the first step's ranks computed
        call["use_kv_cache"] = False
    expected, full_rank = (
        stock_picture(repositories[model], lora, monkeypatch, prepare=prepare, prompt="make it snow", **call)
        for prepare in (attach_rank_schedule, None)
    )
    own = pixels(picture)
    assert np.abs(own - (expected * 255).round().astype(int)).max() <= 1
    assert np.abs(own - full_rank * 255).max() > 4


@every_model
def test_sampling_timesteps_are_the_pipelines(repositories, datasets, arguments, tmp_path, monkeypatch, model):
    module = instantiate(compose("train", *arguments(model, tmp_path / "run", 1)).model)
    stock = []
    call, _ = same_request(model, datasets[model])
    keep = {"prepare": lambda pipeline, _: stock.append(pipeline)}  # not all call back at the end of a step
    stock_picture(repositories[model], None, monkeypatch, prompt="x", **keep, **call)
    sampling = replace(module.sampler.sampling, num_inference_steps=call["num_inference_steps"])
    ours = module.base.sampling_timesteps(4 * 8 // 4, sampling)
    torch.testing.assert_close(ours, stock[0].scheduler.timesteps, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_the_lines_of_the_docs_attach_the_schedule(run, arguments, repositories, tmp_path, monkeypatch):
    model = "flux_dev"
    run("train", *arguments(model, tmp_path / "outputs" / "RUN", 4, "adapter=tlora", "optimizer.lr=3e-2"))
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tlora.md").read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("black-forest-labs/FLUX.1-dev", str(repositories[model])).replace("cuda", "cpu")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    run("predict", "lora=outputs/RUN", "model.dtype=bfloat16", "prompt=x", "width=32", "height=32",
        "num_inference_steps=3", "output_dir=out", "seed=4")  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    expected = names["pipe"](
        "x", width=32, height=32, num_inference_steps=3, max_sequence_length=64, generator=generator, output_type="np"
    ).images[0]
    [picture] = Path("out").glob("*.png")
    assert np.abs(pixels(picture) - (expected * 255).round().astype(int)).max() <= 1
