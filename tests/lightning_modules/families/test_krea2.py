"""Krea 2: its two editing schemes in files and errors, its distilled version, and what LoRA adapts."""

import shutil
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from datamodules.errors import UserError
from datamodules.pairs import collate_pixels
from lightning_modules.adapters.targets import resolve_targets
from lightning_modules.family import Sampling
from lightning_modules.lora_files.reading import LoRAFile, find_weights
from tests.support.commands import compose
from tests.support.krea2_reference import KREA2_REFERENCES
from tests.support.objectives import losses
from tests.support.pictures import pixels
from tests.support.references import raw_sample
from tests.support.tiny_pipelines import MODELS, edit_json


def test_prediction_reads_the_scheme_from_the_file(run, arguments, repositories, datasets, tmp_path):
    """The same LoRA in the other scheme makes another image."""
    settings = ["model.edit_scheme=before", "adapter.init_lora_weights=gaussian", "optimizer.lr=3e-2"]
    run("train", *arguments("krea2_edit", tmp_path / "run", 1, *settings))
    file = LoRAFile(find_weights(str(tmp_path / "run" / "lora" / "last")))
    assert file.header is not None
    assert (file.header["model"]["name"], file.header["model"]["edit_scheme"]) == ("krea2_edit", "before")
    assert "| edit_scheme | before |" in (tmp_path / "run" / "lora" / "last" / "README.md").read_text()
    request = [f"lora={tmp_path / 'run'}", f"image={datasets['krea2_edit'] / 'control_images' / '0.png'}", "prompt=x"]
    request += ["width=64", "height=32", "num_inference_steps=2", "seed=3"]
    model = ["model=krea2_edit", f"model.pretrained_model_name_or_path={repositories['krea2_edit']}"]
    model += ["model.dtype=float32", *MODELS["krea2_edit"].settings]
    made = {}
    for name in ("file", "before", "after"):
        chosen = [] if name == "file" else [*model, f"model.edit_scheme={name}"]
        run("predict", *request, *chosen, f"output_dir={tmp_path / name}")
        [picture] = (tmp_path / name).glob("*.png")
        made[name] = pixels(picture)
    assert np.array_equal(made["file"], made["before"])
    assert not np.array_equal(made["file"], made["after"])


def test_wrong_schemes_are_refused():
    with pytest.raises(Exception, match=r"model\.edit_scheme=beside: choose after, before, or null"):
        instantiate(compose("train", "model=krea2_edit", "model.edit_scheme=beside").model)


def test_pairs_for_text_to_image_name_the_model_that_edits(refuses, repositories, datasets):
    given = ["model=krea2", "data=cached", f"model.pretrained_model_name_or_path={repositories['krea2']}"]
    refuses(*given, root=datasets["krea2_edit"], words="qwen_image_edit, krea2_edit), or train")


def test_distilled_model_has_its_own_shift_and_may_be_guided(repositories, tmp_path, caplog):
    """Its pipeline guides it if asked to; mu is then constant."""
    copy = shutil.copytree(repositories["krea2"], tmp_path / "copy")
    edit_json(copy / "model_index.json", is_distilled=True)
    module = KREA2_REFERENCES["krea2"].build(copy)
    caplog.clear()
    module.sampler.check()
    assert not caplog.messages
    sigmas = module.base.sampling_timesteps(8, Sampling(4, 0.0, None, None)) / 1000
    linear, shift = torch.tensor([1.0, 0.75, 0.5, 0.25]), torch.e**1.15
    torch.testing.assert_close(sigmas, shift * linear / (1 + (shift - 1) * linear), rtol=1e-5, atol=0)


def test_layers_that_see_a_batch_as_one_row_are_left_out(repositories):
    """T-LoRA must not adapt these: each layer whose input has no samples, or more dimensions than (B, L, D)."""
    module = KREA2_REFERENCES["krea2"].build(repositories["krea2"])
    inputs = {}
    for name, layer in module.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in name:
            known = name.replace(".base_layer", "")
            layer.register_forward_pre_hook(lambda _, args, name=known: inputs.update({name: args[0].shape}))
    losses(module, module.encoder(collate_pixels([raw_sample(module, [], None, index) for index in range(2)])))
    flattened = {name for name, shape in inputs.items() if len(shape) != 3 or shape[0] != 2}
    assert flattened == {name for name in inputs if any(fnmatchcase(name, one) for one in module.layers.flattened)}
    transformer = module.base.source.meta
    for targets in (None, "all-linear", ["to_q", "ff.up"]):
        assert not flattened & set(resolve_targets(transformer, module.layers, targets))
    [layer] = [name for name in flattened if name.endswith("projector")]
    assert resolve_targets(transformer, module.layers, ["projector"]) == [layer], "named alone, it is meant"
    with pytest.raises(UserError, match="matches no linear layer"):
        resolve_targets(transformer, module.layers, ["add_q_proj"])
