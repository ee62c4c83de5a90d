"""The promises of a training run, by its real command line."""

import os
import re
from unittest import mock

import pytest
import safetensors.torch
import torch
from omegaconf import OmegaConf

from foundation.errors import UserError
from tests.support.commands import lora_bytes, metrics, short


def test_files_of_a_schedule_free_run_hold_its_average(runs):
    """x of arXiv 2405.15682, where training goes on with y = (1 - beta) z + beta x."""
    folder = runs(4, "optimizer=adamw_schedule_free", "scheduler=constant").folder
    checkpoint = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"].values()
    average = safetensors.torch.load(lora_bytes(folder))
    for (name, y), moments in zip(checkpoint["state_dict"].items(), state, strict=True):
        x = (y - (1 - 0.9) * moments["z"]) / 0.9
        torch.testing.assert_close(average[name.replace(".default", "")], x, rtol=1e-6, atol=1e-7)
        assert not torch.allclose(x, y, rtol=1e-6, atol=5e-6)


def test_max_steps_schedule_and_ranks_count_optimizer_steps(run, tiny, pairs, tmp_path):
    """An earlier system ran past max_train_steps, and its schedule was wrong with accumulation."""
    settings = ["trainer.accumulate_grad_batches=3", "scheduler=linear", "scheduler.num_warmup_steps=2"]
    settings += ["optimizer.lr=8e-4", "adapter=tlora", "adapter.rank=16", "model.timesteps.law=uniform"]
    overrides = [one for one in short(tiny, pairs, tmp_path / "run", 6) if not one.startswith("adapter.rank=")]
    text = run("train", *overrides, *settings).text
    rows = metrics(tmp_path / "run")
    assert [float(row["lr"]) for row in rows] == pytest.approx([0, 4e-4, 8e-4, 6e-4, 4e-4, 2e-4], rel=1e-5)
    ranks = [float(row["active_rank"]) for row in rows]
    assert len(set(ranks)) > 3
    assert f"active rank of 16: {sum(ranks) / len(ranks):.1f} on average in training" in text
    assert (tmp_path / "run" / "active_ranks.png").is_file()


def test_run_folder_contains_the_documented_files(run, gallery, tmp_path):
    shown = gallery("shown")
    folder = shown.folder
    for name in ("step-000002", "step-000004", "last"):
        assert (folder / "lora" / name / "pytorch_lora_weights.safetensors").is_file()
    assert len(list((folder / "samples").glob("step-00000[24]/*.png"))) == 4
    assert (folder / "checkpoints" / "last.ckpt").stat().st_size < 500_000, "a checkpoint holds what trains, only"
    for word in ("Retouch", "rank 4", "6 pairs", "6 of 32x32", str(folder), "python predict.py lora="):
        assert word in shown.text
    assert "Epoch" not in shown.text, "there is no second progress bar"
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.max_steps == 4
    run("train", "-cp", str(folder), "-cn", "config", f"output_dir={tmp_path / 'again'}")
    assert lora_bytes(tmp_path / "again") == lora_bytes(folder), "a run can be repeated from its config.yaml"


def test_loss_that_is_not_finite_is_not_applied_and_stops_after_some(run, tiny, pairs, tmp_path):
    """The first step is absurdly large; afterwards nothing is finite and nothing is applied, but all is saved."""
    settings = ["save_every=0", "optimizer.lr=1e20", "scheduler=constant", "trainer.log_every_n_steps=3"]
    settings.append("model.optimization.max_nonfinite_steps=2")
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 9), *settings, ok=False)
    assert outcome.error.startswith("error: 2 steps in a row were not finite, the last in the loss of 0")
    for step in (2, 3):
        assert re.search(rf"step {step} is skipped: the loss of \d\d is not finite\n", outcome.text)
    learned = safetensors.torch.load(lora_bytes(tmp_path / "run", "step-000003"))
    assert all(tensor.isfinite().all() for tensor in learned.values())
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        *(({name: "backend:native"},) * 2 for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")),
    ],
)
def test_gpu_memory_is_not_left_in_pieces_unless_a_person_sets_the_allocator(run, monkeypatch, given, expected):
    """Steps alternate with sample images, of other sizes; PyTorch reads the setting when CUDA starts."""
    seen = {}

    def look(*_):
        seen.update({name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")})
        raise UserError("seen")

    monkeypatch.setattr("train.chosen_task", look)
    others = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    with mock.patch.dict(os.environ, others | given, clear=True):
        run("train", ok=False)
    assert seen == expected
