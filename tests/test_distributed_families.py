"""Every family in two processes, whole in each (DDP) and split over them (FSDP2), with all that can train."""

import shutil

import pytest

from tests.support.objectives import EVERYTHING
from tests.support.other_adapters import KINDS, OTHERS
from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses, assert_close_models
from tests.support.several_runs import DDP, FSDP
from tests.support.tiny_pipelines import DIFFERENT

LEARNS = {
    "lora": ["adapter=lora", "adapter.target_modules=all-linear", "adapter.rank=4"],
    "dora": ["adapter=dora", "adapter.rank=4", "adapter.alpha=8"],
    "full": ["adapter=full"],
    "every objective": [*EVERYTHING, "objective.preserve.every=2", "adapter.rank=4", "data.reference_dropout=0.4"],
    **OTHERS,
}
CASES = {
    "families": [*((model, "lora") for model in DIFFERENT), ("qwen_image_edit_plus", "full")],
    "others": [("flux_kontext", one) for one in ("every objective", "dora", *KINDS)],
}
WAYS = {"one": ["data.batch_size=2"], "ddp": DDP, "fsdp": FSDP}


@pytest.fixture(scope="module")
def even(datasets, tmp_path_factory):
    """Return, for each family, the four samples of one size: two batches of two."""
    folders = {}
    for model in DIFFERENT:
        folders[model] = tmp_path_factory.mktemp(model)
        shutil.copytree(datasets[model], folders[model], dirs_exist_ok=True, ignore=shutil.ignore_patterns("[45]*"))
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_two_processes_are_one_with_the_doubled_batch_in_every_family(
    run, in_two_processes, arguments, even, tmp_path, cases
):
    """Two steps are compared, since DDP waits for each gradient of the step before."""

    def overrides(way, model, learns):
        common = arguments(model, tmp_path / way / model / learns, 2)
        common = [one for one in common if not one.startswith(("data.root=", "adapter."))]
        settings = ["scheduler=constant", "data.caption_dropout_rate=0", f"data.root={even[model]}", SMOOTH_ADAM]
        return [*common, *settings, *LEARNS[learns], *WAYS[way]]

    several = [("ddp", *one) for one in CASES[cases]]
    several += [("fsdp", *one) for one in CASES[cases] if "full" not in one]
    for one in CASES[cases]:
        run("train", *overrides("one", *one))
    status, text = in_two_processes([overrides(*one) for one in several])
    assert status == 0, text
    for way, model, learns in several:
        one, two = (tmp_path / each / model / learns for each in ("one", way))
        (assert_close_models if learns == "full" else assert_close)(one, two)
        assert_close_losses(one, two)
