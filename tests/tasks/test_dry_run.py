"""The plan of a run: from the real configurations, without weights."""

import re
import shutil

import pytest
import torch
from hydra.utils import instantiate

from datamodules.shards.cache import Cache
from foundation import catalogue
from lightning_modules import flow
from lightning_modules.estimation.memory import PeakMemory, bytes_per_parameter
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from tasks import dry_run as dry_run_module
from tasks.dry_run import base_on_disk, measure
from tasks.models import without_network
from tests.support.commands import ROOT, compose, short
from tests.support.pictures import make_pairs

# As published on the models' pages
PARAMETERS = {
    "flux_kontext": 11_901_408_320,
    "flux_dev": 11_901_408_320,
    "flux2_klein_4b": 3_875_544_576,
    "flux2_klein_9b": 9_078_581_248,
    "flux2_dev": 32_223_281_152,
    "flux3_klein": 5_538_458_368,
    "qwen_image": 20_430_401_088,
    "qwen_image_edit": 20_430_401_088,
    "qwen_image_edit_plus": 20_430_401_088,
    "qwen_image_2_1": 7_115_124_736,
    "z_image": 6_154_908_736,
    "longcat_image_edit": 6_270_668_864,
}
YAMLS = sorted(
    path.stem for path in (ROOT / "conf" / "model").glob("[!_]*.yaml") if path.stem[-4:] not in ("_fp8", "_fp4")
)


@pytest.mark.parametrize("model", YAMLS)
def test_every_model_is_built_without_weights(model):
    cfg = compose("train", f"model={model}")
    module = without_network(cfg.model)
    module.check()
    parameters = sum(parameter.numel() for parameter in module.base.source.meta.parameters())
    assert parameters == PARAMETERS.get(model, parameters)


@pytest.mark.slow
def test_quantized_base_and_waiting_blocks_are_planned(run, pairs, tmp_path):
    plan = ["task=dry_run", f"data.root={pairs}", f"output_dir={tmp_path / 'out'}", "model.gradient_checkpointing=true"]
    sizes = []
    for more in ([], ["model/quantization=fp4"], ["model/quantization=fp4", "model.offload.blocks=6"]):
        text = run("train", *plan, *more).text
        assert ("embedded (fp4)" if more else "embedded (float32)") in text
        assert ("blocks" in text) == (len(more) == 2)
        assert ".weight" not in text, "layers, not parameters, are listed"
        number, unit = re.search(r"weights ([\d.]+) ([kM])B", text).groups()
        sizes.append(float(number) * (1000 if unit == "M" else 1))
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.slow
def test_model_that_is_not_here_is_planned_by_its_configuration(run, repositories, pairs, tmp_path, monkeypatch):
    """Only JSON files exist; the plan is complete, with statistics in the autoencoder's weights."""
    name = compose("train", "model=flux2_klein_4b").model.pretrained_model_name_or_path
    left_out = shutil.ignore_patterns("*.safetensors", "tokenizer*")
    shutil.copytree(repositories["flux2_klein_4b"], tmp_path / name.replace("/", "--"), ignore=left_out)
    monkeypatch.setattr(catalogue, "CONFIGURATIONS", tmp_path)
    where = [f"data.root={pairs}", f"output_dir={tmp_path / 'out'}", "model.max_sequence_length=64"]
    text = run("train", "task=dry_run", "model=flux2_klein_4b", "data.upscale=true", "data.resolution=64", *where).text
    assert "GPU in all" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=flux_dev", "data=cached"], "black-forest-labs/FLUX.1-dev makes images from text only"),
        (
            ["model=qwen_image_edit", "model.pretrained_model_name_or_path=black-forest-labs/FLUX.1-dev"],
            "black-forest-labs/FLUX.1-dev is made for FluxPipeline: choose model=flux_dev",
        ),
        (["-m", "adapter.rank=4,8"], "task=dry_run plans one run"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed is not compatible with model.dtype=float32"),
        (["trainer.accelerator=gpuu"], "trainer.accelerator=gpuu: choose auto, cpu"),
        (["trainer.devices=0"], "trainer.devices=0: at least one"),
        (["objective=dpo"], "objective=dpo learns from pairs"),
        (["monitor=foo"], "monitor=foo: no such figure is measured"),
        (["monitor=psnr"], "monitor=psnr needs samples that are held out"),
        (["sample_root=/nowhere"], "sample_root=/nowhere: no such file"),
        (["ckpt_path=/nowhere.ckpt"], "there is no checkpoint /nowhere.ckpt"),
        (["early_stopping=true", "callbacks.validation=null"], "callbacks.validation=null measures nothing"),
    ],
)
def test_mistakes_are_named_as_they_were_written(run, pairs, tmp_path, overrides, words):
    plan = ["task=dry_run", f"data.root={pairs}", f"output_dir={tmp_path / 'out'}"]
    assert words in run("train", *overrides, *plan, ok=False).text


def test_plan_says_how_large_the_base_is_and_what_is_downloaded_of_it(monkeypatch):
    module = without_network(compose("train", "model=flux_kontext").model)
    encoders = ("text_encoder", "text_encoder_2", "vae")
    assert base_on_disk(module.base, encoders) == "", "nothing is said about a hub that does not answer"
    bytes_of = {"transformer": (24e9, 24e9), "text_encoder_2": (9e9, 0), "text_encoder": (1e9, 0)}
    asked = []
    monkeypatch.setattr(
        dry_run_module, "stored_bytes", lambda *place: asked.append(place) or bytes_of.get(place[2], (0, 0))
    )
    assert base_on_disk(module.base, encoders) == "; base 34.0 GB, of which 24.0 GB is to be downloaded"
    assert {place[0] for place in asked} == {"black-forest-labs/FLUX.1-Kontext-dev"}
    assert {place[2] for place in asked} == {*encoders, "transformer"}
    embedded = without_network(compose("train").model)
    monkeypatch.undo()
    assert re.fullmatch(r"; base [\d.]+ MB", base_on_disk(embedded.base, encoders))


@pytest.mark.parametrize(("name", "expected"), [("adamw", 8), ("adamw_8bit", 2), ("prodigy", 16), ("adafactor", 0.03)])
def test_optimizer_state_is_what_the_optimizer_keeps(name, expected):
    cfg = compose("train", f"optimizer={name}")
    assert bytes_per_parameter(instantiate(cfg.optimizer)) == pytest.approx(expected, rel=0.05)


@pytest.fixture
def planned(run, tiny, tmp_path):
    """Return the plan of a tiny run on images of two sizes, its module, overrides and config."""
    root = make_pairs(tmp_path / "data", [(64, 48)] * 2 + [(128, 96)] * 3)
    own_cache = ["data.resolution=null", f"data.cache_dir={tmp_path / 'cache'}"]
    overrides = [*short(tiny, root, tmp_path / "run", 1), *own_cache]
    cfg = compose("train", *overrides, "data.batch_size=2")
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    data.configure_for(module)
    data.scan()
    return measure(module, data, samples=True), module, overrides, cfg


@pytest.mark.slow
def test_cache_is_as_large_as_planned(run, planned, tmp_path):
    plan, _, overrides, _ = planned
    run("train", *overrides)
    (folder,) = [path.parent for path in (tmp_path / "cache").glob("*/manifest.json")]
    headers = 450 * len(rows := list(Cache(folder, {}).rows()))
    assert sum(row["bytes"] for row in rows) - headers == pytest.approx(plan.cache, rel=0.05)


def test_planned_activations_are_those_of_a_real_step(planned):
    """A real step of the same kind is counted in the same way."""
    plan, planned_module, _, cfg = planned
    assert planned_module.transformer is None
    assert plan.trained["weights"] == 4 * plan.parameters
    assert plan.trained["adapter"] == plan.trained["optimizer"] == 8 * plan.trainable
    samples, (images, _) = plan.batch.samples, plan.batch.size
    assert (samples, images) == (2, ((128, 96), (128, 96)))
    module = instantiate(cfg.model)
    module.configure_model()
    x_t = torch.randn(2, 8, 12, 16)
    prompt = {"prompt_embeds": torch.randn(2, 16, 32), "pooled_prompt_embeds": torch.randn(2, 32)}
    peaks = {}
    for checkpointing in POLICIES:
        set_checkpointing(module.transformer, checkpointing, module.execution.recomputed)
        with PeakMemory() as memory:
            known = [tensor.detach() for tensor in (*module.transformer.parameters(), x_t, *prompt.values())]
            t, control = torch.rand(2), torch.randn_like(x_t)
            memory.restart()
            velocity = module.denoise(x_t, t, [control], prompt)
            flow.flow_loss(velocity, x_t).mean().backward()
        assert known
        peaks[checkpointing] = memory.peak - plan.trained["adapter"] // 2
        module.transformer.zero_grad(set_to_none=True)
    assert peaks["none"] > peaks["every_2"] > peaks["attention"] > peaks["full"]
    assert peaks["none"] > 1.5 * peaks["full"]
    for checkpointing, peak in peaks.items():
        assert plan.activations[checkpointing] == pytest.approx(peak, rel=0.05)
