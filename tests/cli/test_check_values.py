"""Kinds and ranges of numbers and switches, checked before anything is created."""

import math
from copy import deepcopy

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cli.check_values import check_ranges, check_run
from foundation.errors import UserError
from foundation.settings import Rule, declared
from tests.support.commands import compose, run_code


@pytest.fixture(scope="module")
def composed():
    return {script: compose(script) for script in ("train", "predict")}


@pytest.mark.parametrize("script", ["train", "predict"])
def test_no_number_may_be_infinite_or_nan(script):
    rules = {key: one.rule for key, one in declared(script).settings.items() if one.rule and not one.rule.is_text}
    assert len(rules) > 70
    for key, rule in rules.items():
        for value in (
            math.nan,
            math.inf,
            -math.inf,
            "abc",
            *([] if rule.kind == "bool" or True in rule.also else [True, []]),
        ):
            assert not rule.allows(value), key


@pytest.mark.parametrize("comment", ["int => 1", "float >= 0 or", "int >= 1 and more; task=edit"])
def test_a_comment_that_is_nearly_a_rule_is_refused_not_ignored(comment):
    with pytest.raises(ValueError, match="not a rule"):
        Rule.parse(comment)


SEED = "a whole number from 0 to 4294967295"
SCALE = "must be a number or null or a list of them or a mapping {PATTERN:NUMBER}"


@pytest.mark.parametrize(
    ("script", "key", "values", "rule"),
    [
        ("train", "adapter.alpha", ["0", "nan"], "must be a number above 0 or null"),
        ("train", "adapter.rank", ["abc", "seed", "0", "1.5"], "must be a whole number from 1 on"),
        ("train", "adapter.rank_pattern", ["8", "{a: 0}"], "{PATTERN:NUMBER} with a whole number from 1 on each"),
        ("train", "optimizer.betas", ["[0.9,1.0]"], "must be a list of 2 with a number from 0 to 0.99999 each"),
        ("train", "model.timesteps.shift", ["0", "static"], "must be a number above 0 or dynamic or null"),
        ("train", "scheduler.num_warmup_steps", ["2001"], "must not be above trainer.max_steps=100"),
        ("train", "model.max_sequence_length", ["0", "513"], "must be a whole number from 1 to 512"),
        ("train", "model.vae_name_or_path", ["[a]", "1"], "must be a path or null"),
        ("train", "model.compile", ["abc", "1"], "must be true or false or auto"),
        ("train", "seed", ["-1", "abc", "1.5", "1e20", "null", "[1,2]"], f"must be {SEED}"),
        ("predict", "seed", ["[]", f"{10**23}"], f"must be {SEED} or a list of them"),
        ("predict", "height", ["abc", "40"], "must be a whole number, a multiple of 16, from 16 on or null"),
        ("predict", "lora_scale", ["[1,nan]", "{}", "{a.*:much}", "{a.*:true}", "{a.*:???}", "{a.*:[1,2]}"], SCALE),
        ("predict", "lora_scale", ["[{*:0.5},{*:1}]"], SCALE),
        ("predict", "average.relative_std", ["0.3"], "must be a number above 0 to 0.28 or a list of them"),
    ],
)
def test_a_value_out_of_its_range_is_named(composed, script, key, values, rule):
    for value in values:
        parsed = OverridesParser.create().parse_override(f"{key}={value}").value()
        cfg = deepcopy(composed[script])
        OmegaConf.update(cfg, key, parsed, merge=False)
        with pytest.raises(UserError) as raised:
            check_ranges(cfg, script)
        assert str(raised.value).startswith(f"{key}=")
        assert str(raised.value).endswith(rule)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("adapter.rank", "16", "adapter.rank=16"),
        ("optimizer.lr", "1e-4", "optimizer.lr=1e-4"),
        ("adapter.alpha", "null", "adapter.alpha=null"),
        ("model.compile", "true", "model.compile=true"),
        ("optimizer.betas", ["0.9", 0.99], "optimizer.betas=[0.9, 0.99]"),
        ("adapter.rank_pattern", {"a": "8"}, "adapter.rank_pattern={a: 8}"),
    ],
)
def test_a_quoted_number_is_reported_as_text(composed, key, value, fix):
    cfg = deepcopy(composed["train"])
    OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(UserError) as raised:
        check_ranges(cfg, "train")
    assert str(raised.value) == f"{key}={value!r}: this is text. Write it without quotes: {fix}."


@pytest.mark.parametrize(
    "overrides", [["trainer.precision=32"], ["model.dtype=bfloat16", "trainer.precision=bf16"], []]
)
def test_names_of_lightning_for_the_right_precision_are_accepted(overrides):
    check_run(compose("train", *overrides))


def test_precision_is_reported_as_typed():
    for precision in ("16-mixed", "bf16", "bf16-true", "16", "64-true"):
        with pytest.raises(UserError, match=f"trainer.precision={precision} is not compatible with .* use 32-true"):
            check_run(compose("train", f"trainer.precision={precision}"))


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        (["optimizer=prodigy", "optimizer.lr=1e-4"], "lr=0.0001 is 10000 times below 1, the usual rate of prodigyopt"),
        (["optimizer=prodigy", "optimizer.lr=0.5"], None),
        (["optimizer=muon", "optimizer.lr=1e-5"], "2000 times below 0.02"),
        (["optimizer.lr=1"], "10000 times above 0.0001"),
        (["optimizer=paged_adamw_8bit", "optimizer.lr=1e-7"], "1000 times below 0.0001"),
        (["optimizer=adamw_schedule_free", "optimizer.lr=1e-3"], None),
        (["optimizer.lr=0"], None),
        (["model/quantization=fp4", "optimizer.lr=1e-4"], None),
        ([], None),
    ],
)
def test_a_learning_rate_far_from_the_optimizers_is_noted(caplog, overrides, how):
    check_run(compose("train", "model=flux_kontext", *overrides))
    assert ("the usual rate of" in caplog.text) == (how is not None)
    assert (how or "") in caplog.text


def test_a_short_run_on_fp4_reaches_its_learning_rate():
    warmup = {n: compose("train", "model=flux_kontext_fp4", f"trainer.max_steps={n}").scheduler for n in (20, 3000)}
    assert warmup[20].num_warmup_steps == 2
    assert warmup[3000].num_warmup_steps == 100


def test_mistakes_are_reported_before_imports_that_take_seconds():
    code = (
        "import sys, train\n"
        "sys.argv = ['train.py', 'data.batch_size=-1']\n"
        "try: train.main()\n"
        "except SystemExit: print({'torch', 'lightning'} & set(sys.modules))"
    )
    done = run_code(code)
    assert "data.batch_size=-1" in done.stderr
    assert done.stdout == "set()\n"
