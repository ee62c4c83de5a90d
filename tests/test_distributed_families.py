"""Every family in two processes, whole in each (DDP) and split over them (FSDP2), with all that can train."""

import shutil

import pytest

from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses, assert_close_models
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_pipelines import MODELS

ADAPTERS = {"lora": ["adapter.target_modules=all-linear", "adapter.rank=4"], "full": []}
FAMILIES = [name for name, model in MODELS.items() if not model.variant]
KINDS = {"one": ["data.batch_size=2"], "ddp": DDP, "fsdp": FSDP}


@pytest.fixture(scope="module")
def even(datasets, tmp_path_factory):
    """Return, for each family, the four samples of one size: two batches of two."""
    folders = {}
    for model in FAMILIES:
        folders[model] = tmp_path_factory.mktemp(model)
        shutil.copytree(datasets[model], folders[model], dirs_exist_ok=True, ignore=shutil.ignore_patterns("[45]*"))
    return folders


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch_in_every_family(run, in_two_processes, arguments, even, tmp_path):
    """In a second step as well: DDP waits for each gradient of the one before."""

    def overrides(kind, model, adapter):
        common = arguments(model, tmp_path / kind / model / adapter, 2)
        common = [one for one in common if not one.startswith(("data.root=", "adapter."))]
        settings = ["scheduler=constant", "data.caption_dropout_rate=0", f"data.root={even[model]}", SMOOTH_ADAM]
        return [*common, *settings, f"adapter={adapter}", *ADAPTERS[adapter], *KINDS[kind]]

    alone = [*((model, "lora") for model in FAMILIES), ("qwen_image_edit_plus", "full")]
    several = [*(("ddp", *one) for one in alone), *(("fsdp", *one) for one in alone[:-1])]
    for one in alone:
        run("train", *overrides("one", *one))
    status, text = in_two_processes([overrides(*one) for one in several])
    assert status == 0, text
    for kind, model, adapter in several:
        one, two = (tmp_path / each / model / adapter for each in ("one", kind))
        (assert_close if adapter == "lora" else assert_close_models)(one, two)
        assert_close_losses(one, two)
