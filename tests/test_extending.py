"""A new family, adapter and quantization format: each is files of its own, and nothing shared is touched."""

import inspect
import re
import sys
import textwrap

import pytest
import torch
from torch import nn

from lightning_modules.families.flux.denoise import flux_velocity
from lightning_modules.quantization.linear import QuantizationFormat
from lightning_modules.quantization.quantization import QUANTIZATIONS
from tests.support.commands import ROOT, metrics, short

PAGE = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
FAMILY, MODEL = (re.search(rf"A family is.*?```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "yaml"))

ADAPTER = '''
    """Only the biases train."""

    import safetensors.torch

    from lightning_modules.adapters.adapter import Adapter, trainable


    class Biases(Adapter):
        folder = "biases"

        def check(self, base, sharded, text_sees_images):
            pass

        def inject(self, transformer, layers):
            for name, parameter in transformer.named_parameters():
                parameter.requires_grad_(name.endswith("attn.to_q.bias"))
            transformer.train()

        def tensors(self, part):
            return {name: parameter.detach() for name, parameter in trainable(part).items()}

        def gather(self, parts):
            return {name: tensor.clone() for name, tensor in self.tensors(parts["transformer"]).items()}

        def write(self, folder, gathered, base, header, dtype):
            folder.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(gathered, folder / "biases.safetensors")

        def describe(self, trained):
            return f"{len(trained)} biases"

        def predict_arguments(self, run, model_name):
            return {"biases": run}

        def loading_code(self, weights):
            return []
'''


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Write a Python file, and a YAML of a group; gives the option that lets Hydra find this."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(module, code, config="", settings=""):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        monkeypatch.delitem(sys.modules, module, raising=False)
        if config:
            path = tmp_path / "conf" / f"{config}.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(textwrap.dedent(settings))
        return ["--config-dir", tmp_path / "conf"]

    return add


def losses_of(folder):
    return [float(row["loss"]) for row in metrics(folder)]


def test_family_of_the_guide_is_a_module_and_a_yaml(run, add, tiny, pairs, tmp_path):
    """Its LoRA is written and used."""
    option = add("toy_family", FAMILY, "model/toy", MODEL)
    common = [one for one in short(tiny, pairs / "training_images", tmp_path / "run", 1) if one != "data=cached"]
    run("train", *option, "model=toy", "data=captions", "model.dtype=float32", *common)
    assert len(losses_of(tmp_path / "run")) == 1
    request = ["prompt=x", "height=32", "width=32", f"model.pretrained_model_name_or_path={tiny}", "model=toy"]
    loras = [f"lora={tmp_path / 'run'}", "model.dtype=float32", f"output_dir={tmp_path / 'pictures'}"]
    run("predict", *option, *request, *loras, "trainer.accelerator=cpu")
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1


def test_guide_quotes_files_as_they_are():
    assert inspect.getsource(flux_velocity) in PAGE
    assert (ROOT / "conf/model/flux2_klein_9b.yaml").read_text(encoding="utf-8") in PAGE


def test_adapter_is_a_file_and_a_yaml(run, add, tiny, pairs, tmp_path):
    option = add("toy_adapter", ADAPTER, "adapter/biases", "_target_: toy_adapter.Biases\n")
    common = [one for one in short(tiny, pairs, tmp_path / "run", 4) if one != "adapter.rank=4"]
    more = ["model=flux_kontext", "adapter=biases", "model.dtype=float32", "model.max_sequence_length=64"]
    run("train", *option, *common, *more, "trainer.max_steps=2", "scheduler=constant")
    assert (tmp_path / "run" / "biases" / "step-000002" / "biases.safetensors").is_file()
    run("train", *option, *common, *more, "scheduler=constant", "ckpt_path=last")
    assert len(losses_of(tmp_path / "run")) == 4
    weights = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert weights
    assert all(name.endswith("attn.to_q.bias") for name in weights)


class Rounded(nn.Linear):
    """Weights in steps of 1/64."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict({name: (64 * one).round() / 64 for name, one in linear.state_dict().items()})
        self.requires_grad_(False)


@pytest.mark.slow
def test_quantization_format_is_a_row(run, tiny, pairs, tmp_path, monkeypatch):
    asked = ["model=flux_kontext", "model/quantization=fp8", "model.quantization.format=rounded"]
    arguments = [*asked, *short(tiny, pairs, tmp_path / "run", 2), "model.max_sequence_length=64"]
    row = QuantizationFormat(7.0, Rounded, lambda *_: None, [], "no other tensors", [])
    monkeypatch.setitem(QUANTIZATIONS, "rounded", row)
    assert "(rounded)" in run("train", *arguments).text
