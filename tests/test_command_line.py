"""What train.py makes of its arguments."""

import sys

import pytest

import train
from tasks.arguments import quote_values
from tests.support.commands import compose, metrics, short, weights


def test_prodigy_and_schedule_free_bring_a_constant_schedule():
    for name in ("prodigy", "adamw_schedule_free"):
        assert compose("train", f"optimizer={name}").scheduler._target_.endswith("get_constant_schedule_with_warmup")
    chosen = compose("train", "optimizer=prodigy", "scheduler=cosine")
    assert "cosine" in chosen.scheduler._target_


def test_overrides_of_a_repeated_run_count(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2))
    again = [f"output_dir={tmp_path / 'again'}", "adapter.rank=2", "optimizer.lr=0.5", "trainer.max_steps=3"]
    run("train", "-cp", tmp_path / "run", "-cn", "config", *again)
    assert weights(tmp_path / "again")["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"].shape[0] == 2
    rates = [float(row["lr"]) for row in metrics(tmp_path / "again")]
    assert rates == pytest.approx([0.5, 0.375, 0.125], rel=1e-4)


def test_help_explains_itself_quickly(run):
    text = run("train", "--help").text
    for word in ("adapter.rank", "ckpt_path=last", "optimizer: adafactor, adamw, adamw_8bit", "Examples", "embedded"):
        assert word in text
    assert "lora_scale" in run("predict", "--help").text
    assert "  root: null" in run("train", "--cfg", "job").text


@pytest.mark.parametrize("arguments", [[], ["--cfg", "job"], ["data.root=pairs"], ["model=flux_kontext"]])
def test_without_arguments_the_embedded_model_learns_from_drawn_examples(monkeypatch, arguments):
    monkeypatch.setattr(train, "run", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    train.main()
    assert sys.argv[1:] == (quote_values(arguments) or ["experiment=shapes"])


def test_model_without_data_is_one_line(run, tiny, tmp_path):
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model=flux_kontext", f"output_dir={tmp_path / 'run'}"]
    outcome = run("train", *settings, ok=False)
    assert outcome.error == "error: no data to train on: give data.root=FOLDER, or experiment=shapes for drawn examples"
    assert "loading" not in outcome.text
