"""What train.py makes of its arguments."""

import pytest
from hydra._internal.utils import get_args_parser

import train
from tasks.arguments import quote_values, read_arguments
from tests.support.commands import compose, metrics, short, weights


def test_prodigy_and_schedule_free_bring_a_constant_schedule():
    for name in ("prodigy", "adamw_schedule_free"):
        assert compose("train", f"optimizer={name}").scheduler._target_.endswith("get_constant_schedule_with_warmup")
    chosen = compose("train", "optimizer=prodigy", "scheduler=cosine")
    assert "cosine" in chosen.scheduler._target_


def test_overrides_of_a_repeated_run_count(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2), "scheduler=cosine")
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


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], "experiment=shapes"),
        (["-m"], "experiment=shapes"),
        (["-m", "optimizer.lr=1e-3,2e-3"], "experiment=shapes"),
        (["optimizer.lr=1e-3,2e-3", "-m"], "experiment=shapes"),
        (["adapter=tlora", "--info", "searchpath"], "experiment=shapes"),
        (["--cfg", "job"], "experiment=embedded"),  # shows what own data would get
        (["adapter=tlora", "--cfg", "job"], "experiment=embedded"),
        (["-c", "job", "adapter=tlora"], "experiment=embedded"),
        (["-c", "job", "model=flux_kontext"], None),
        (["model=embedded", "adapter=tlora"], "experiment=shapes"),
        (["optimizer=prodigy"], "data=shapes"),  # which finds a learning rate of its own
        (["adapter=full"], "data=shapes"),
        (["data.root=pairs"], "experiment=embedded"),
        (["data.root=pairs", "model=embedded"], "experiment=embedded"),
        (["data.root=pairs", "optimizer=prodigy"], None),
        (["data.root=pairs", "--cfg", "job"], "experiment=embedded"),
        (["data.root=pairs", "model=flux_kontext"], None),
        (["model=flux_kontext"], None),
        (["experiment=quick"], None),
        (["data.shards=s3://bucket/folder"], "experiment=embedded"),
        (["-cp", "outputs/RUN", "-cn", "config"], None),
    ],
)
def test_settings_of_the_embedded_model_are_for_those_who_name_none(arguments, added):
    complete = read_arguments(arguments, "train", train.with_examples)
    before, after = (get_args_parser().parse_args(one) for one in (quote_values(arguments), complete))
    assert set(after.overrides) == {*before.overrides, *([added] if added else [])}
    assert after.multirun == before.multirun


def test_model_without_data_is_one_line(run, tiny, tmp_path):
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model=flux_kontext", f"output_dir={tmp_path / 'run'}"]
    outcome = run("train", *settings, ok=False)
    assert outcome.error == "error: no data to train on: give data.root=FOLDER, or data=shapes for drawn examples"
    assert "loading" not in outcome.text
