"""A training adapter is in the transformer while it trains, and nowhere else."""

import json
import math
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from safetensors import safe_open
from torch._dynamo.utils import counters

from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.writing import write
from tests.support.combinations import first
from tests.support.commands import ROOT, compose, rows, run_code, short, weights
from tests.support.lora_files import layer_names, random_updates
from tests.support.pictures import pixels
from tests.support.servers import hub
from tests.support.steps import BASES
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


def step(module):
    learn(module)
    loss = velocity(module, [0.3, 0.8]).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


def test_a_step_equals_one_on_a_base_with_the_adapter_in_its_weights(tiny, summed, file):
    expected = step(build(summed, "tlora"))
    for more in ([], STREAMED):
        found = step(build(tiny, "tlora", f"model.training_adapter={file}", *more))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(step(build(tiny, "tlora"))["loss"], expected["loss"], rtol=1e-2)


@pytest.mark.parametrize(
    ("adapter", "frozen", "more", "dtype"),
    first(
        2,
        [
            ("lora", "lora", STREAMED, "bfloat16"),
            ("lokr", "lora", BASES["nf4"], "bfloat16"),
            ("lora", "lora", [], "float32"),
            ("lora", "lokr", [], "bfloat16"),
        ],
    ),
)
def test_disabled_training_adapter_leaves_the_base_and_returns_bitwise(
    tiny, file, gallery, adapter, frozen, more, dtype
):
    training_adapter = file if frozen == "lora" else gallery(frozen).folder
    module = build(tiny, adapter, f"model.training_adapter={training_adapter}", *more, dtype=dtype)
    plain = build(tiny, adapter, *more, dtype=dtype)
    learn(module)
    learn(plain)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        before = velocity(module, [0.3])
        trained = {name: one.clone() for name, one in trainable(module.transformer).items()}
        with module.execution.for_inference():
            assert torch.equal(velocity(module, [0.3]), velocity(plain, [0.3]))
        assert torch.equal(velocity(module, [0.3]), before)
        assert not torch.equal(velocity(plain, [0.3]), before)
    assert trainable(module.transformer).keys() == trained.keys()
    if adapter == frozen:  # others are around one another, by other names
        assert trained.keys() == trainable(plain.transformer).keys()
        assert module.trained.tensors().keys() == plain.trained.tensors().keys()


@pytest.mark.slow
def test_images_and_validation_are_without_the_training_adapter(run, tiny, pairs, file, tmp_path):
    settings = ["callbacks.sample_images.count=1", "model.sampling.num_inference_steps=2", "data.val_count=2"]
    settings += ["optimizer.lr=3e-2", "scheduler=constant", "callbacks.model_card=null", "callbacks.report=null"]
    settings += ["model.dtype=float32", "adapter=tlora"]
    ours, theirs = tmp_path / "with", tmp_path / "without"
    run("train", *short(tiny, pairs, ours, 2, shown=True), *settings, f"model.training_adapter={file}")
    run("train", *short(tiny, pairs, theirs, 2, shown=True), *settings)
    pictures = [next((one / "samples/step-000000").glob("*.png")) for one in (ours, theirs)]
    assert np.array_equal(*map(pixels, pictures))
    first, last = rows(ours)
    assert first == rows(theirs)[0]
    assert all(math.isfinite(value) for value in last.values())
    own, other = weights(ours), weights(theirs)
    assert own.keys() == other.keys()
    assert any(not torch.equal(own[name], other[name]) for name in own)
    with safe_open(ours / f"lora/last/{WEIGHTS}", "pt") as opened:
        header = json.loads(opened.metadata()["retouch"])
    assert header["training_adapter"] == file.name
    assert "training_adapter" not in header["model"]


@pytest.mark.slow
def test_a_file_or_a_repository_of_the_hub(file, tmp_path, monkeypatch):
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("v1.safetensors", "v2.safetensors"):
        (folder / name).write_bytes(file.read_bytes())
    code = (
        "import json, sys\n"
        "from lightning_modules.lora_files.reading import find_or_download\n"
        "from foundation.errors import UserError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(find_or_download(name).name)\n"
        "    except UserError as error: print(error)\n"
    )

    def found(*names, address="http://127.0.0.1:1", offline="0"):
        environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "home")}
        return run_code(code, *names, cwd=ROOT, PYTHONPATH=str(ROOT), **environment).stdout.splitlines()

    with hub(folder) as address:
        several, second, missing = found(
            "owner/name", "owner/name/v2.safetensors", "owner/name/v3.safetensors", address=address
        )
        (folder / "v2.safetensors").unlink()
        shutil.rmtree(tmp_path / "home")
        [single] = found("owner/name", address=address)
    assert "owner/name contains v1.safetensors, v2.safetensors. Choose one" in several
    assert (second, single) == ("v2.safetensors", "v1.safetensors")
    assert "owner/name has no v3.safetensors" in missing
    cached, unreachable = found("owner/name", "owner/other", offline="1")
    assert cached == "v1.safetensors"
    assert "owner/other is not a folder here and huggingface.co cannot be reached" in unreachable


def test_incompatible_training_adapters_are_refused(gallery, tiny, file, tmp_path):
    names = layer_names("flux_kontext", build(tiny, "lora").base.source.meta)
    write(tmp_path / WEIGHTS, random_updates(names, "to_q", dora=True), {})
    other = tmp_path / "other.safetensors"
    write(other, {"blocks.0.to_q": LowRank(torch.ones(2, 8), torch.ones(8, 2))}, {})
    for training_adapter, adapter, words in (
        (tmp_path / WEIGHTS, "lora", "a LoRA, LoKr or LoHa is needed, not DoRA"),
        (gallery("tlora").folder, "lora", "its rank follows the timestep"),
        (other, "lora", f"the LoRA {other} does not fit {tiny}"),
        ("[a,b]", "lora", "name one LoRA"),
        (file, "full", "with adapter=full all weights would learn"),
    ):
        settings = [f"model.pretrained_model_name_or_path={tiny}", f"model.training_adapter={training_adapter}"]
        with pytest.raises((UserError, InstantiationException), match=re.escape(words)):
            instantiate(compose("train", "model=flux_kontext", f"adapter={adapter}", *settings).model).check()


@pytest.mark.slow
def test_compiled_blocks_stay_compiled(tiny, file, monkeypatch):
    """The adapter is switched on and off within the layers."""
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
        found = {"loss": loss.detach(), **gradients(module)}
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad(), module.execution.for_inference():
            velocity(module, [0.3, 0.8])
    assert counters["stats"]["unique_graphs"] == graphs > 0
    torch._dynamo.reset()
