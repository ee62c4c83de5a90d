"""The arguments of train.py and predict.py."""

import pytest
from omegaconf import OmegaConf

from tests.support.commands import compose


def test_overrides_of_a_repeated_run_count(run, gallery):
    again = ["adapter.rank=2", "optimizer.lr=0.5", "scheduler.name=cosine", "--cfg", "job"]
    settings = run("train", "-cp", gallery("plain").folder, "-cn", "config", *again).text
    cfg = OmegaConf.create(settings[settings.index("callbacks:") :])
    assert (cfg.adapter.rank, cfg.optimizer.lr, cfg.scheduler.name, cfg.trainer.max_steps) == (2, 0.5, "cosine", 2)


def test_help_explains_itself_quickly(run):
    text = run("train", "--help").text
    for word in ("adapter.rank", "ckpt_path=last", "optimizer: adafactor, adamw, adamw_8bit", "Examples", "embedded"):
        assert word in text
    assert "lora_scale" in run("predict", "--help").text


@pytest.mark.parametrize(
    ("arguments", "data", "held_out"),
    [
        ([], "sunset/train", "sunset/held_out"),
        (["data.root=mine"], "mine", None),
        (["data.root=mine", "data=cached"], "mine", None),
        (["data.shards=s3://bucket/folder"], None, None),
        (["data.root=mine", "model=flux_kontext"], "mine", None),
        (["data.root=mine", "model.pretrained_model_name_or_path=other"], "mine", None),
    ],
)
def test_embedded_model_learns_sunset_unless_data_or_a_model_are_named(arguments, data, held_out):
    cfg = compose("train", *arguments)
    usual, embedded = (1, 1e-4, "constant_with_warmup", None), (8, 3e-3, "constant_with_warmup", "all-linear")
    places = [place and place.rpartition("assets/")[2] for place in (cfg.data.root, cfg.data.val_root)]
    assert places == [data, held_out]
    recipe = (cfg.data.batch_size, cfg.optimizer.lr, cfg.scheduler.name, cfg.adapter.target_modules)
    assert recipe == (usual if any(one.startswith("model") for one in arguments) else embedded)


def test_model_without_data_is_one_line(refuses):
    words = "error: no data to train on: give data.root=FOLDER, or data=sunset for an example"
    assert refuses("model=flux_kontext", "data.root=null") == words
