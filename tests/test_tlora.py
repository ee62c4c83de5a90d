"""What is promised of T-LoRA by the command line, for every model."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from datamodules.images.dataset import collate
from lightning_modules.adapters.formats.diffusers import read_adapter
from lightning_modules.adapters.rank_mask import attach_rank_schedule, mask_forwards
from tests.conftest import ROOT, compose, lora_bytes, randomize, short
from tests.stock_pictures import same_request, stock_picture
from tests.support.tiny_pipelines import MODELS

EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
BOTH = pytest.mark.parametrize("adapter", ["tlora", "ortho_tlora"])


def level(picture):
    """A PNG's pixels."""
    return np.asarray(Image.open(picture)).astype(int)


@BOTH
@EVERY_MODEL
def test_stock_pipeline_with_the_schedule_makes_the_picture_of_predict(
    run, arguments, repositories, datasets, tmp_path, monkeypatch, model, adapter
):
    """With true CFG, both of whose passes have the same mask; without the schedule, the full rank."""
    settings = [f"adapter={adapter}", "adapter.alpha=7", "adapter.target_modules=all-linear", "optimizer.lr=3e-2"]
    run("train", *arguments(model, tmp_path / "run", 6, *settings, "data.batch_size=2"))
    monkeypatch.chdir(tmp_path)
    call, request = same_request(model, datasets[model])
    run("predict", f"lora={tmp_path / 'run'}", "prompt=make it snow", "output_dir=out", *request)
    (picture,) = (tmp_path / "out").glob("*.png")
    lora = tmp_path / "run" / "lora" / "last"
    expected, full_rank = (
        stock_picture(repositories[model], lora, monkeypatch, prepare=prepare, prompt="make it snow", **call)
        for prepare in (attach_rank_schedule, None)
    )
    own = level(picture)
    assert np.abs(own - (expected * 255).round().astype(int)).max() <= 1
    assert np.abs(own - full_rank * 255).max() > 4


@BOTH
@EVERY_MODEL
def test_batch_of_different_timesteps_gives_what_its_samples_give_alone(run, arguments, tmp_path, model, adapter):
    """Token activations, modulations without tokens, and Edit-2511's, which have two rows for each sample."""
    settings = [f"adapter={adapter}", "adapter.target_modules=all-linear", "data.cache_dir=null"]
    settings += ["model.timesteps.law=uniform"]
    cfg = compose("train", *arguments(model, tmp_path / "run", 1, *settings))
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    module.configure_model()
    randomize(module.transformer)
    mask_forwards(module.transformer, module.rank_gates, lambda: None)
    data.serve(module)
    data.scan()
    samples = data.pixels(4)
    for number, sample in enumerate(samples):
        sample.draws = [number]
    ranks = []
    with torch.no_grad():
        alone = []
        for sample in samples:
            alone.append(module.losses(module.encode(sample)))
            ranks += module.rank_gates[0].active_ranks.tolist()
        together = module.losses(module.encode(collate(samples)))
    assert module.rank_gates[0].active_ranks.tolist() == ranks
    assert len(set(ranks)) > 1
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "adapter"), [*((model, "tlora") for model in MODELS), ("flux_kontext", "ortho_tlora")]
)
def test_resumed_run_is_bitwise_the_uninterrupted_one(run, arguments, tmp_path, model, adapter):
    settings = [f"adapter={adapter}", "adapter.dropout=0.2", "data.batch_size=2", "scheduler=constant"]
    run("train", *arguments(model, tmp_path / "whole", 6, *settings))
    run("train", *arguments(model, tmp_path / "halves", 3, *settings))
    run("train", *arguments(model, tmp_path / "halves", 6, *settings), "ckpt_path=last")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "prodigy"])
def test_resume_is_bitwise_where_masked_components_are_held(run, tiny, pairs, tmp_path, optimizer):
    settings = ["adapter=tlora", "adapter.update_masked=false", "scheduler=constant", f"optimizer={optimizer}"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 6), *settings)
    run("train", *short(tiny, pairs, tmp_path / "halves", 3), *settings)
    run("train", *short(tiny, pairs, tmp_path / "halves", 6), *settings, "ckpt_path=last")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    "optimizer", [["optimizer=adamw"], ["optimizer=prodigy", "+optimizer.d0=0.01", "optimizer.weight_decay=0.1"]]
)
def test_components_that_no_timestep_uses_stay_as_they_were_drawn(run, tiny, pairs, tmp_path, optimizer):
    """The rank is 1 in every step; momentum has nothing to do, but weight decay has."""
    down = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    rows = {}
    for update_masked, steps in ((False, 1), (False, 4), (True, 4)):
        output = tmp_path / f"{update_masked}-{steps}"
        settings = [
            "adapter=tlora",
            f"adapter.update_masked={update_masked}",
            "adapter.alpha_rank_scale=10",
            "model.timesteps.shift=100",
        ]
        run("train", *short(tiny, pairs, output, steps), *settings, "scheduler=constant", *optimizer)
        rows[update_masked, steps] = safetensors.torch.load(lora_bytes(output))[down]
    assert torch.equal(rows[False, 4][1:], rows[False, 1][1:])
    assert not torch.equal(rows[False, 4][0], rows[False, 1][0])
    assert (rows[True, 4][1:].abs() < rows[False, 4][1:].abs()).all()


@EVERY_MODEL
def test_sampling_timesteps_are_the_pipelines(repositories, datasets, arguments, tmp_path, monkeypatch, model):
    module = instantiate(compose("train", *arguments(model, tmp_path / "run", 1)).model)
    seen = []
    call, _ = same_request(model, datasets[model])
    stock_picture(
        repositories[model], None, monkeypatch, prompt="x", **call,
        callback_on_step_end=lambda pipeline, *_: seen.append(pipeline.scheduler.timesteps) or {},
    )  # fmt: skip
    ours = module.sampling_timesteps(torch.Size((4, 8)), call["num_inference_steps"])
    torch.testing.assert_close(ours, seen[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("adapter", "kind"), [("tlora", "timestep"), ("ortho_tlora", "normalised"), ("tlora", "step_index")]
)
def test_sample_pictures_have_the_ranks_of_prediction_and_leave_training_as_it_is(
    run, tiny, pairs, tmp_path, adapter, kind
):
    """Made in the middle of an accumulation window, between two batches."""
    settings = [f"adapter={adapter}", f"adapter.rank_schedule={kind}", "adapter.target_modules=all-linear"]
    settings += ["optimizer.lr=3e-2", "scheduler=constant", "trainer.accumulate_grad_batches=2"]
    settings += ["model.gradient_checkpointing=true", "model.dtype=bfloat16"]
    common = [a for a in short(tiny, pairs, tmp_path / "run", 3) if not a.startswith("callbacks.sample_images=")]
    pictures = ["callbacks.sample_images.count=1", "callbacks.sample_images.num_inference_steps=3"]
    run("train", *common, *settings, *pictures, "sample_every=1")
    run("train", *short(tiny, pairs, tmp_path / "without", 3), *settings)
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "without")
    image = pairs / "control_images" / "00.png"
    request = [f"image={image}", "prompt=mirror picture 0", "num_inference_steps=3", f"output_dir={tmp_path / 'out'}"]
    run("predict", f"lora={tmp_path / 'run'}", *request)
    [picture] = (tmp_path / "out").glob("*.png")
    strip = level(tmp_path / "run" / "samples" / "step-000003" / "00.png")
    assert np.array_equal(strip[:, 32:64], level(picture))


def test_full_mask_trains_the_weights_of_plain_lora(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "lora", 4))
    full = ["adapter=tlora", "adapter.rank_schedule=constant", "adapter.init_lora_weights=true"]
    run("train", *short(tiny, pairs, tmp_path / "tlora", 4), *full)
    one, other = (safetensors.torch.load(lora_bytes(tmp_path / name)) for name in ("lora", "tlora"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_are_logged_and_drawn(run, tiny, pairs, tmp_path):
    arguments = ["adapter=tlora", "adapter.rank=16", "model.timesteps.law=uniform", "trainer.accumulate_grad_batches=2"]
    overrides = [a for a in short(tiny, pairs, tmp_path / "run", 8) if not a.startswith("adapter.rank=")]
    text = run("train", *overrides, *arguments).text
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    ranks = [float(row["active_rank"]) for row in rows]
    mean = sum(ranks) / len(ranks)
    assert len(set(ranks)) > 4
    assert f"active rank of 16: {mean:.1f} on average in training" in text
    assert "T-LoRA rank 1 to 16 (timestep)" in text
    with Image.open(tmp_path / "run" / "active_ranks.png") as picture:
        assert picture.size == (800, 400)


def test_plain_lora_has_nothing_of_it(run, tiny, pairs, tmp_path):
    text = run("train", *short(tiny, pairs, tmp_path / "run", 1)).text
    assert "active" not in text + (tmp_path / "run" / "metrics.csv").read_text()
    assert not (tmp_path / "run" / "active_ranks.png").exists()
    assert "rank_schedule" not in read_adapter(tmp_path / "run/lora/last/pytorch_lora_weights.safetensors")


def test_a_t_lora_and_a_plain_one_are_mixed_each_with_its_own_ranks(run, tiny, stock, pairs, tmp_path):
    for adapter in ("lora", "tlora"):
        settings = [f"adapter={adapter}", "optimizer.lr=3e-2", "adapter.target_modules=all-linear"]
        run("train", *short(tiny, pairs, tmp_path / adapter, 4), *settings)
    image = pairs / "control_images" / "00.png"
    loras = [tmp_path / name / "lora" / "last" for name in ("tlora", "lora")]
    request = [
        f"image={image}",
        "prompt=x",
        "num_inference_steps=3",
        "lora_scale=0.7",
        f"output_dir={tmp_path / 'out'}",
    ]
    run("predict", f"lora=[{loras[0]},{loras[1]}]", *request, "seed=5")
    for name, lora in zip("ab", loras, strict=True):
        stock.load_lora_weights(lora, adapter_name=name)
    stock.set_adapters(["a", "b"], [0.7, 0.7])
    attach_rank_schedule(stock, loras[0], "a")
    expected = stock(
        image=Image.open(image), prompt="x", height=32, width=32, max_area=1024, _auto_resize=False, guidance_scale=2.5,
        num_inference_steps=3, max_sequence_length=16, generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    [picture] = (tmp_path / "out").glob("*.png")
    assert np.abs(level(picture) - np.asarray(expected).astype(int)).max() <= 1


def test_training_without_the_callback_is_one_line(run, tiny, pairs, tmp_path):
    outcome = run(
        "train", *short(tiny, pairs, tmp_path / "run", 1), "adapter=tlora", "~callbacks.rank_schedule", ok=False
    )
    assert "ran without a rank mask: train and predict with callbacks.rank_schedule" in outcome.error


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
    assert np.abs(level(picture) - (expected * 255).round().astype(int)).max() <= 1


@BOTH
def test_dry_run_plans_it(run, tiny, pairs, tmp_path, adapter):
    text = run("train", *short(tiny, pairs, tmp_path / "run", 1), "task=dry_run", f"adapter={adapter}").text
    assert ("orthogonal T-LoRA" if adapter == "ortho_tlora" else "T-LoRA") + " rank 1 to 4 (timestep)" in text


def test_header_of_a_file_from_elsewhere_cannot_ask_for_nonsense(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 1), "adapter=tlora")
    file = tmp_path / "run/lora/last/pytorch_lora_weights.safetensors"
    with safetensors.safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["retouch"])
    header["adapter"]["rank_schedule"]["kind"] = "os.system"
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, {"retouch": json.dumps(header)})
    outcome = run("predict", f"lora={file}", "prompt=x", "width=32", "height=32", ok=False)
    assert "os.system" in outcome.error
    assert str(file) in outcome.error


@pytest.mark.parametrize(
    ("experiment", "layers", "rank", "steps"), [("tlora_single_image", 247, 32, 1000), ("tlora_material", 171, 16, 500)]
)
def test_recipes_adapt_the_layers_that_they_name(experiment, layers, rank, steps):
    """Of FLUX.1 [dev]: 19 double blocks and 38 single blocks."""
    from diffusers import FluxTransformer2DModel

    cfg = compose("train", f"experiment={experiment}")
    assert (cfg.adapter.rank, cfg.trainer.max_steps, cfg.data.caption_dropout_rate) == (rank, steps, 0)
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(guidance_embeds=True)
    module = instantiate(cfg.model)
    module.adapter.inject(transformer)
    down = [name for name, p in transformer.named_parameters() if p.requires_grad and ".lora_A." in name]
    assert len(down) == layers
    assert OmegaConf.select(cfg, "model.timesteps.law") == "uniform"
