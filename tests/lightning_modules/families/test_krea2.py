"""Krea 2: its two editing schemes in files and errors, its distilled version, and what LoRA adapts."""

import shutil
from fnmatch import fnmatchcase

import hydra
import pytest
import torch
from hydra.utils import instantiate

from cli.resolvers import CONF
from datamodules.pairs import collate_pixels
from foundation.errors import UserError
from lightning_modules.adapters.targets import resolve_targets
from lightning_modules.families.krea2.denoise import SCHEMES
from lightning_modules.families.krea2.module import Krea2
from lightning_modules.family import Sampling
from lightning_modules.lora_files.reading import LoRAFile, find_weights
from tasks.models import model_settings
from tests.support.commands import compose
from tests.support.krea2_reference import KREA2_REFERENCES
from tests.support.objectives import losses
from tests.support.references import raw_sample
from tests.support.tiny_pipelines import edit_json


@pytest.mark.slow
def test_prediction_reads_the_scheme_from_the_file(run, arguments, repositories, tmp_path):
    run("train", *arguments("krea2_edit", tmp_path / "run", 1, "model.edit_scheme=before"))
    file = LoRAFile(find_weights(str(tmp_path / "run" / "lora" / "last")))
    assert "| edit_scheme | before |" in (tmp_path / "run" / "lora" / "last" / "README.md").read_text()
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        base = f"model.pretrained_model_name_or_path={repositories['krea2_edit']}"
        settings = model_settings(hydra.compose("predict"), [file.header], [base])
    module = instantiate(settings)
    assert (type(module), module.edit_scheme) == (Krea2, "before")
    assert module.latent_pipeline.scheme == SCHEMES["before"]


def test_wrong_schemes_are_refused():
    with pytest.raises(Exception, match=r"model\.edit_scheme=beside: choose after, before, or null"):
        instantiate(compose("train", "model=krea2_edit", "model.edit_scheme=beside").model)
    with pytest.raises(Exception, match=r"model\.condition_image_size=null: the text encoder sees each reference"):
        instantiate(compose("train", "model=krea2_edit", "model.condition_image_size=null").model)


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
