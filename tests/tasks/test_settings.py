"""Every number and switch in conf/ has a kind and a range, which are looked at before anything is made."""

import math
from copy import deepcopy

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf

from datamodules.errors import UserError
from tasks.settings import RULES, Switch, check_ranges
from tests.support.commands import ROOT, compose, run_code

GROUPS = ("model", "data", "adapter", "optimizer", "scheduler", "trainer", "experiment")
FILES = {group: sorted(path.stem for path in (ROOT / "conf" / group).glob("[!_]*.yaml")) for group in GROUPS}
FILES["trainer"].remove("predict")
# Each file of a group in one of them at least; an experiment chooses of other groups.
COMPOSITIONS = [
    *([f"experiment={name}"] for name in FILES.pop("experiment")),
    *zip(
        *(
            [f"{group}={names[number % len(names)]}" for number in range(max(map(len, FILES.values())))]
            for group, names in FILES.items()
        ),
        strict=True,
    ),
]
PREDICTIONS = [[], ["captioner=qwen3_vl", "captioner/quantization=nf4"]]
# torchmetrics looks at its own arguments; the other is a choice of words, of which true is one.
ELSEWHERE = ("callbacks.validation.metrics.", "adapter.init_lora_weights", "model.recipe.init_lora_weights")


def leaves(node, path=""):
    """Return the settings that are not interpolated from others, by name."""
    for name in node:
        key = f"{path}{name}"
        if str(name).startswith("_") or (
            path and OmegaConf.is_interpolation(node, name) and not isinstance(node[name], int | float)
        ):
            continue
        if isinstance(node[name], DictConfig):
            yield from leaves(node[name], f"{key}.")
        else:
            yield key, node[name]


@pytest.mark.parametrize(
    ("script", "overrides"),
    [*(("predict", one) for one in PREDICTIONS), *(("train", one) for one in COMPOSITIONS)],
    ids=str,
)
def test_every_number_and_switch_has_a_rule_that_its_default_keeps(script, overrides):
    cfg = compose(script, *overrides, *(["model/quantization=fp8"] if len(overrides) > 1 else []))
    for key, value in leaves(cfg):
        numbers = list(value) if isinstance(value, ListConfig) else [value]
        if any(isinstance(one, int | float) for one in numbers) and not key.startswith(ELSEWHERE):
            assert key in RULES[script], f"{key}={value} has no rule in tasks/settings.py"
    check_ranges(cfg, script)


@pytest.fixture(scope="module")
def composed():
    return {script: compose(script) for script in RULES}


def parse(override):
    """Return the key and value of an override as parsed by Hydra."""
    parsed = OverridesParser.create().parse_override(override)
    return {parsed.key_or_group: parsed.value()}


@pytest.mark.parametrize("script", RULES)
def test_no_number_may_be_infinite_or_nan(script):
    for key, rule in RULES[script].items():
        assert not rule.allows(math.nan), key
        assert not rule.allows(math.inf), key
        assert not rule.allows(-math.inf), key
        assert not rule.allows("abc"), key
        if not isinstance(rule, Switch):
            assert not rule.allows(True), key
            assert not rule.allows([]), key


@pytest.mark.parametrize(
    ("script", "override", "rule"),
    [
        ("train", "adapter.alpha=0", "must be a number above 0 or null"),
        ("train", "adapter.alpha=nan", "must be a number above 0 or null"),
        ("train", "adapter.rank=abc", "must be a whole number from 1 on"),
        ("train", "trainer.max_steps=0", "must be a whole number from 1 on"),
        ("train", "trainer.max_steps=1.5", "must be a whole number from 1 on"),
        ("train", "save_every=-1", "must be a whole number from 0 on"),
        ("train", "data.batch_size=0", "must be a whole number from 1 on"),
        ("train", "data.num_workers=-1", "must be a whole number from 0 on"),
        ("train", "data.max_tokens_per_batch=0", "must be a whole number from 1 on or null"),
        ("train", "optimizer.lr=-1", "must be a number from 0 on"),
        ("train", "optimizer.lr=inf", "must be a number from 0 on"),
        ("train", "optimizer.lr=abc", "must be a number from 0 on"),
        ("train", "optimizer.betas=[0.9,1.0]", "must be a number from 0 to 0.99999 or a list of them"),
        ("train", "model.timesteps.shift=-1", "must be a number above 0 to 1000 or dynamic or null"),
        ("train", "model.timesteps.shift=0", "must be a number above 0 to 1000 or dynamic or null"),
        ("train", "model.timesteps.shift=static", "must be a number above 0 to 1000 or dynamic or null"),
        ("train", "data.caption_dropout_rate=2", "must be a number from 0 to 1"),
        ("train", "data.caption_dropout_rate=abc", "must be a number from 0 to 1"),
        ("train", "trainer.accumulate_grad_batches=1.5", "must be a whole number from 1 on"),
        ("train", "trainer.accumulate_grad_batches=0", "must be a whole number from 1 on"),
        ("train", "trainer.log_every_n_steps=0", "must be a whole number from 1 on"),
        ("train", "trainer.gradient_clip_val=-1", "must be a number from 0 on or null"),
        ("train", "scheduler.num_warmup_steps=-1", "must be a whole number from 0 on"),
        ("train", "scheduler.num_warmup_steps=abc", "must be a whole number from 0 on"),
        ("train", "scheduler.num_warmup_steps=2001", "must not be above trainer.max_steps=600"),
        ("train", "model.max_sequence_length=0", "must be a whole number from 1 to 512"),
        ("train", "model.max_sequence_length=-1", "must be a whole number from 1 to 512"),
        ("train", "model.compile=abc", "must be true or false"),
        ("train", "model.offload.activations=maybe", "must be true or false"),
        ("train", "save_every=abc", "must be a whole number from 0 on"),
        ("train", "seed=-1", "must be a whole number from 0 to 4294967295"),
        ("train", "seed=abc", "must be a whole number from 0 to 4294967295"),
        ("train", "seed=1.5", "must be a whole number from 0 to 4294967295"),
        ("train", "seed=1e20", "must be a whole number from 0 to 4294967295"),
        ("train", "seed=null", "must be a whole number from 0 to 4294967295"),
        ("train", "seed=[1,2]", "must be a whole number from 0 to 4294967295"),
        ("predict", "seed=[]", "must be a whole number from 0 to 4294967295 or a list of them"),
        ("predict", f"seed={10**23}", "must be a whole number from 0 to 4294967295 or a list of them"),
        ("predict", "height=abc", "must be a whole number, a multiple of 16, from 16 on or null"),
        ("predict", "width=40", "must be a whole number, a multiple of 16, from 16 on or null"),
        ("predict", "lora_scale=[1,nan]", "must be a number or null or a list of them or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a.*:much}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a.*:true}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a.*:inf}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a.*:???}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a.*:[1,2]}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "lora_scale={a:{b:1}}", "or a mapping {PATTERN:NUMBER}"),
        ("predict", "num_images_per_prompt=0", "must be a whole number from 1 on"),
        ("predict", "batch_size=1.5", "must be a whole number from 1 on"),
        ("predict", "fuse=perhaps", "must be true or false"),
    ],
)
def test_what_is_out_of_its_range_is_named(composed, script, override, rule):
    cfg = deepcopy(composed[script])
    [(key, value)] = parse(override).items()
    OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(UserError) as raised:
        check_ranges(cfg, script)
    assert str(raised.value).startswith(f"{override.partition('=')[0]}=")
    assert str(raised.value).endswith(rule)
    assert "\n" not in str(raised.value)


def test_the_command_line_says_so_before_anything_is_made(run, tmp_path):
    for script, override in (("train", "adapter.alpha=nan"), ("predict", "seed=[]")):
        outcome = run(script, override, f"output_dir={tmp_path / 'out'}", ok=False)
        assert f"error: {override.partition('=')[0]}=" in outcome.error
        assert not (tmp_path / "out").exists()


def test_a_short_run_on_fp4_comes_to_its_learning_rate():
    warmup = {n: compose("train", "model=flux_kontext_fp4", f"trainer.max_steps={n}").scheduler for n in (20, 3000)}
    assert warmup[20].num_warmup_steps == 2
    assert warmup[3000].num_warmup_steps == 100


@pytest.mark.parametrize("script", ["train", "predict"])
def test_mistakes_are_said_before_what_takes_seconds_to_import(script):
    code = (
        f"import sys, {script}\n"
        f"sys.argv = ['{script}.py', 'data.batch_size=-1']\n"
        f"try: {script}.main()\n"
        "except SystemExit: print({'torch', 'lightning'} & set(sys.modules))"
    )
    done = run_code(code)
    assert "data.batch_size=-1" in done.stderr
    assert done.stdout == "set()\n"
