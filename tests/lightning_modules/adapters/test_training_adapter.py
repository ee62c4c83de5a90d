"""A training adapter is in the transformer while it trains, and nowhere else."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image
from safetensors import safe_open
from torch._dynamo.utils import counters

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.writing import write
from tests.support.combinations import first
from tests.support.commands import ROOT, compose, lora_bytes, rows, run_code, short, weights
from tests.support.hub_server import REVISION, hub
from tests.support.lora_files import layer_names, random_updates
from tests.support.same_runs import SMOOTH_ADAM, assert_close
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_adapters import build, gradients, learn, velocity

WEIGHTS = "pytorch_lora_weights.safetensors"
STREAMED = ["model.offload.blocks=2", "model.gradient_checkpointing=full"]


@pytest.fixture(scope="module")
def updates(tiny):
    """Draw updates of the attention layers, and of a layer that no adapter of the tests trains."""
    names = layer_names("flux_kontext", build(tiny, "lora").base.source.meta)
    return random_updates(names, "all-linear", size=0.15)


@pytest.fixture(scope="module")
def file(updates, tmp_path_factory):
    """Write a training adapter."""
    path = tmp_path_factory.mktemp("training_adapter") / "undistil.safetensors"
    write(path, updates, {})
    return path


@pytest.fixture(scope="module")
def summed(tiny, updates, tmp_path_factory):
    """Return the tiny pipeline with the updates in its transformer's weights."""
    from diffusers import FluxKontextPipeline

    pipeline = FluxKontextPipeline.from_pretrained(tiny)
    for name, update in updates.items():
        layer = pipeline.transformer.get_submodule(name)
        layer.weight.data = layer.weight.data + update.up @ update.down
    folder = tmp_path_factory.mktemp("summed")
    pipeline.save_pretrained(folder)
    return folder


def build_to_check(tiny, *more):
    settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}"]
    return instantiate(compose("train", *settings, *more).model, _convert_="all")


def step(module):
    """Return the loss and the gradients of a step."""
    learn(module)
    loss = velocity(module, [0.3, 0.8]).square().mean()
    loss.backward()
    return loss.detach(), gradients(module)


def assert_same_step(one, other, tolerance=1e-5):
    for ours, theirs in zip(({"loss": one[0]}, one[1]), ({"loss": other[0]}, other[1]), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("adapter", first(1, ["tlora", "lora", "ortho_tlora"]))
def test_a_step_is_that_on_a_base_whose_weights_hold_it(tiny, summed, file, adapter):
    expected = step(build(summed, adapter))
    assert_same_step(step(build(tiny, adapter, f"model.training_adapter={file}")), expected)
    assert_same_step(step(build(tiny, adapter, f"model.training_adapter={file}", *STREAMED)), expected)
    without = step(build(tiny, adapter))
    assert not torch.allclose(without[0], expected[0], rtol=1e-2)


@pytest.mark.parametrize("more", [[], STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_left_out_it_has_never_been_there_and_comes_back_bitwise(tiny, file, more, dtype):
    module = build(tiny, "lora", f"model.training_adapter={file}", *more, dtype=dtype)
    plain = build(tiny, "lora", *more, dtype=dtype)
    learn(module)
    learn(plain)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        before = velocity(module, [0.3])
        trained = {name: one.clone() for name, one in trainable(module.transformer).items()}
        with module.execution.for_inference():
            assert torch.equal(velocity(module, [0.3]), velocity(plain, [0.3]))
        assert torch.equal(velocity(module, [0.3]), before)
        assert not torch.equal(velocity(plain, [0.3]), before)
    assert trainable(module.transformer).keys() == trained.keys() == trainable(plain.transformer).keys()
    assert module.trained.tensors().keys() == plain.trained.tensors().keys()


def test_a_dora_is_refused(tiny, tmp_path):
    names = layer_names("flux_kontext", build(tiny, "lora").base.source.meta)
    write(tmp_path / WEIGHTS, random_updates(names, "to_q", dora=True), {})
    with pytest.raises(UserError, match="a LoRA, LoKr or LoHa is needed, not DoRA"):
        build_to_check(tiny, f"model.training_adapter={tmp_path}").check()


@pytest.fixture
def shown(tiny, pairs, tmp_path):
    """Return overrides of a run of two steps with two sets of images of held-out pairs."""

    def shown(name, *more, steps=2):
        pictures = ["callbacks.sample_images.count=1", "model.sampling.num_inference_steps=2", "data.val_count=2"]
        fast = ["optimizer.lr=3e-2", "scheduler=constant", "callbacks.model_card=null", "callbacks.report=null"]
        common = short(tiny, pairs, tmp_path / name, steps, shown=True)
        return [*common, *pictures, *fast, *more]

    return shown


def strip(folder, step=0):
    [path] = (folder / f"samples/step-{step:06d}").glob("*.png")
    return np.asarray(Image.open(path))


COMBINATIONS = {
    "tlora": ["model.dtype=float32", "adapter=tlora"],
    "streamed": STREAMED,
    "fp4": ["model/quantization=fp4"],
}


@pytest.mark.parametrize("more", first(1, COMBINATIONS.values()), ids=COMBINATIONS)
def test_pictures_and_validation_are_without_it_and_training_is_with_it(run, shown, file, tmp_path, more):
    run("train", *shown("with", *more, f"model.training_adapter={file}"))
    run("train", *shown("without", *more))
    ours, theirs = tmp_path / "with", tmp_path / "without"
    assert np.array_equal(strip(ours), strip(theirs))
    first, last = rows(ours)
    assert first == rows(theirs)[0]
    assert all(math.isfinite(value) for value in last.values())
    own, other = weights(ours), weights(theirs)
    assert own.keys() == other.keys()
    assert any(not torch.equal(own[name], other[name]) for name in own)
    states = [
        torch.load(one / "checkpoints/last.ckpt", weights_only=True, map_location="cpu")["state_dict"]
        for one in (ours, theirs)
    ]
    assert states[0].keys() == states[1].keys()


def test_a_prediction_is_without_it_as_in_stock_diffusers(run, shown, file, stock, photo, tmp_path):
    run("train", *shown("run", f"model.training_adapter={file}", "model.dtype=float32", steps=4))
    with safe_open(tmp_path / f"run/lora/last/{WEIGHTS}", "pt") as opened:
        header = json.loads(opened.metadata()["retouch"])
    assert header["training_adapter"] == file.name
    assert "training_adapter" not in header["model"]
    request = [f"image={photo}", "prompt=snow", "seed=3", "num_inference_steps=2", "guidance_scale=2.5"]
    where = [f"lora={tmp_path / 'run'}", f"output_dir={tmp_path / 'made'}", "trainer.accelerator=cpu"]
    outcome = run("predict", *where, *request)
    assert "was trained on" not in outcome.text
    [made] = (tmp_path / "made").glob("*.png")
    stock.load_lora_weights(tmp_path / "run/lora/last")
    settings = {"num_inference_steps": 2, "guidance_scale": 2.5, "width": 48, "height": 32, "max_area": 48 * 32}
    generator = torch.Generator().manual_seed(3)
    picture = {"image": Image.open(photo), "_auto_resize": False, "generator": generator, "max_sequence_length": 16}
    expected = stock(prompt="snow", **picture, **settings).images[0]
    assert np.abs(np.asarray(expected, int) - np.asarray(Image.open(made), int)).max() <= 1


@pytest.mark.slow
def test_resuming_is_bitwise(run, shown, file, tmp_path):
    settings = [f"model.training_adapter={file}", "save_every=2", "sample_every=1"]
    run("train", *shown("whole", *settings, steps=4))
    run("train", *shown("parted", *settings, steps=2))
    run("train", *shown("parted", *settings, "ckpt_path=last", steps=4))
    assert lora_bytes(tmp_path / "whole") == lora_bytes(tmp_path / "parted")


@pytest.mark.slow
def test_a_file_or_a_repository_of_the_hub(file, tmp_path, monkeypatch):
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("v1.safetensors", "v2.safetensors"):
        (folder / name).write_bytes(file.read_bytes())
    code = (
        "import json, sys\n"
        "from lightning_modules.lora_files.find import find_or_download\n"
        "from datamodules.errors import UserError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(find_or_download(name).name)\n"
        "    except UserError as error: print(error)\n"
    )
    names = ("owner/name", "owner/name/v2.safetensors", "owner/name/v3.safetensors", "owner/other", str(file))

    def found(address="http://127.0.0.1:1", offline="0", names=names):
        environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "home")}
        return run_code(code, *names, cwd=ROOT, PYTHONPATH=str(ROOT), **environment).stdout.splitlines()

    with hub(folder) as address:
        several, second, missing, other, path = found(address)
        (folder / "v2.safetensors").unlink()
        shutil.rmtree(tmp_path / "home")
        [single] = found(address, names=["owner/name"])
        (folder / WEIGHTS).write_bytes(b"")
        [usual] = found(address, names=["owner/name"])
    assert "owner/name contains v1.safetensors, v2.safetensors. Choose one" in several
    assert (second, single, usual, path) == ("v2.safetensors", "v1.safetensors", WEIGHTS, file.name)
    assert "owner/name has no v3.safetensors" in missing
    assert "owner/other is neither a folder here nor a repository you may read" in other
    (tmp_path / f"home/hub/models--owner--name/snapshots/{REVISION}/{WEIGHTS}").unlink()
    assert found(offline="1", names=["owner/name", "owner/other"]) == ["v1.safetensors", UNREACHABLE]


UNREACHABLE = (
    "owner/other is not a folder here and huggingface.co cannot be reached: check the network (and HF_HUB_OFFLINE), or "
    "pass the path of a downloaded copy; it is not in the hub's cache"
)


@pytest.mark.slow
def test_what_it_does_not_go_with_is_one_line(fails, learned, tiny, file, tmp_path):
    def refused(name, *more):
        return fails(f"model.training_adapter={name}", *more)

    with pytest.raises(UserError, match="with adapter=full all weights would learn"):
        build_to_check(tiny, f"model.training_adapter={file}", "adapter=full").check()
    assert "its rank follows the timestep" in refused(learned("tlora"))
    other = tmp_path / "other.safetensors"
    write(other, {"blocks.0.to_q": LowRank(torch.ones(2, 8), torch.ones(8, 2))}, {})
    assert f"the LoRA {other} does not fit {tiny}" in refused(other)
    assert "no such file or folder" in refused(tmp_path / "nowhere")
    assert "name one LoRA" in refused("[a,b]")
    assert "owner/other is not a folder here and huggingface.co cannot be reached" in refused("owner/other")


@pytest.mark.slow
def test_compiled_blocks_go_on_compiled(tiny, file, monkeypatch):
    """It is switched on and off within the layers."""
    expected = step(build(tiny, "lora", f"model.training_adapter={file}", *STREAMED))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    module = build(tiny, "lora", f"model.training_adapter={file}", *STREAMED, "model.compile=true")
    learn(module)
    for _ in range(2):
        graphs = counters["stats"]["unique_graphs"]
        module.zero_grad()
        loss = velocity(module, [0.3, 0.8]).square().mean()
        loss.backward()
        assert_same_step((loss.detach(), gradients(module)), expected, 1e-4)
        with torch.no_grad(), module.execution.for_inference():
            velocity(module, [0.3, 0.8])
    assert counters["stats"]["unique_graphs"] == graphs > 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_two_processes_with_it_are_one_with_the_doubled_batch(run, in_two_processes, shown, file, tmp_path):
    common = [f"model.training_adapter={file}", "model.dtype=float32", "optimizer.lr=1e-3", SMOOTH_ADAM]
    common += ["model.gradient_checkpointing=full"]
    run("train", *shown("one", *common, "data.batch_size=2"))
    status, text = in_two_processes([shown("ddp", *common, *DDP), shown("fsdp", *common, *FSDP)])
    assert status == 0, text
    run("train", *shown("without", "model.dtype=float32", steps=1))
    for kind in ("ddp", "fsdp"):
        assert_close(tmp_path / "one", tmp_path / kind)
        assert np.abs(strip(tmp_path / kind).astype(int) - strip(tmp_path / "without")).max() <= 1
        assert rows(tmp_path / kind)[0]["val_loss"] == pytest.approx(rows(tmp_path / "without")[0]["val_loss"])
