"""Every misspelt key is refused wherever it is given, and the intended setting is named."""

import random
import re
import shlex
import shutil
from copy import deepcopy

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from cli.arguments import hydras_errors, read_arguments
from cli.check_keys import TASKS, check_keys, check_read, chosen_task, nearest
from foundation import settings as module
from foundation.errors import UserError
from foundation.settings import CONF, declared, parents
from tests.support.commands import ROOT, compose


class TakesAny:
    """A class that accepts any argument."""

    def __init__(self, **settings):
        self.settings = settings


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def misspelt(key, chance):
    """Return the key with one letter replaced, added, left out or swapped with the next."""
    place = chance.choice([index for index, letter in enumerate(key) if letter != "."])
    letter, before, here, after = chance.choice(LETTERS), key[:place], key[place], key[place + 1 :]
    made = [before + letter + after, before + letter + here + after, before + after]
    made += [before + after[:1] + here + after[1:]] if after[:1] not in ("", ".") else []
    return chance.choice([one for one in made if one != key and ".." not in one and one.strip(".") == one])


@pytest.fixture(scope="module")
def composed():
    return {script: compose(script) for script in TASKS}


def added(cfg, values):
    cfg = deepcopy(cfg)
    for key, value in values.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


@pytest.mark.parametrize("script", TASKS)
def test_any_key_misspelt_by_a_letter_is_refused_wherever_it_is_given(composed, script):
    """Places: the command line, a sweep, and for some keys a YAML of one's own."""
    chance, known = random.Random(0), declared(script)
    for key in known.settings:
        wrong = misspelt(key, chance)
        holders = [known.settings[one].rule for one in (key, *parents(key)) if one in known.settings]
        if known.knows(wrong) or "._" in key or any(rule and rule.takes_keys for rule in holders):
            continue
        attempts = [lambda given: read_arguments(given, script)]
        parent = OmegaConf.select(composed[script], wrong.rpartition(".")[0] or "x")
        if chance.random() < 0.3 and isinstance(parent, DictConfig | None):
            attempts.append(lambda given: check_keys(added(composed[script], {given[-1].split("=")[0]: 1}), script))
        given = chance.choice([[f"{wrong}=1"], ["-m", f"{wrong}=1,2"]])
        for attempt in attempts:
            with pytest.raises(UserError, match=re.escape(f"Did you mean {key}?").replace(r"\.", "[./]")) as raised:
                attempt(given)
            assert "\n" not in str(raised.value)


def test_own_file_inside_conf_declares_nothing_where_no_class_would_take_it(composed, tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf/model/mine.yaml").write_text("defaults: [flux_kontext, _self_]\noffload: {encodres: true}\n")
    monkeypatch.setattr(module, "CONF", tmp_path / "conf")
    known = module.Declared("train")
    assert "mine" in known.groups["model"]
    assert known.settings.keys() == declared("train").settings.keys()
    assert nearest(known, "model.offload.encodres") == "model.offload.encoders"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("train", "optimzer.lr=1", "optimzer.lr: there is no such setting. Did you mean optimizer.lr?"),
        ("train", "+lr=1e-5 +batch_size=2", "lr: there is no such setting. Did you mean optimizer.lr?"),
        ("train", "--lr 1e-4", "--lr: there is no such option. Settings are written KEY=VALUE, without dashes"),
        ("predict", "prompt=make it snow", 'it: it is not KEY=VALUE. Quote the prompt: prompt="...".'),
        ("predict", "+xyz=a.png", "xyz: there is no such setting. `python predict.py --help` names"),
        ("predict", "optimizer.lr=1", "optimizer.lr: there is no such setting. It is a setting of train.py."),
        ("train", "lora=x", "lora: there is no such setting. It is a setting of predict.py."),
        ("train", "model=flux_kontext tlora", "tlora: it is not KEY=VALUE. Write adapter=tlora."),
        ("train", "model=flux_kontext nothing", "nothing: it is not KEY=VALUE. Write GROUP=NAME or KEY=VALUE."),
        ("train", "dry_run", "dry_run: it is not KEY=VALUE. Write task=dry_run."),
        (
            "train",
            "'adapter.rank_pattern={\"a.*\":4}'",
            "Keys of a mapping have no quotes: adapter.rank_pattern='{KEY:VALUE}'.",
        ),
        ("train", f"'{ROOT}/assets'", f"assets: it is not KEY=VALUE. Write data.root={ROOT}/assets."),
        ("predict", f"'{ROOT}/assets'", f"Write image={ROOT}/assets."),
        ("predict", "steps=5", "Did you mean num_inference_steps?"),
        ("predict", "model.sampling.steps=5", "Did you mean model.sampling.num_inference_steps?"),
        ("train", "steps=5", "Did you mean trainer.max_steps?"),
        ("train", "max_train_steps=5", "Did you mean trainer.max_steps?"),
        ("train", "callbacks.sample_images.num_image=1", "callbacks.sample_images has count, max_area, output_dir, "),
        ("train", "adapter.dim=1", "adapter.dim: there is no such setting. adapter has "),
        ("train", "optimizer.rank=1", "Did you mean adapter.rank?"),
        ("train", "~adapter.rnk", "Did you mean adapter.rank?"),
        ("train", "~callbacks.sample_imags", "Did you mean callbacks.sample_images?"),
        ("train", "model/quantisation=fp8", "Did you mean model/quantization?"),
        ("train", "adapter=null", "adapter=null: a choice is needed. Choose dora, full, loha"),
        ("train", "optimizer.amsgrad=true", "needs a +: +optimizer.amsgrad=VALUE."),
        ("train", "optimizer.lr=[", "optimizer.lr=[: no viable alternative at input '['"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(script, arguments, words):
    with pytest.raises(UserError) as raised:
        read_arguments(shlex.split(arguments), script)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("script", "overrides", "words"),
    [
        ("train", ["model=flux_kontex"], "model=flux_kontex: there is no such choice. Did you mean flux_kontext?"),
        ("train", ["data=parquet"], "there is no such choice. Choose cached, captions, pairs, sunset."),
        ("train", ["optimizer.momentum=3"], "the chosen options lack this setting. Choose optimizer=muon."),
        ("train", ["optimizer.lr=1,2"], "several values are a sweep, which needs -m"),
        (
            "train",
            ["experiment=repair", "data.control={recipe: {jpeg: 10}}"],
            "data.control={recipe: {jpeg: 10}}: a mapping cannot replace the list that is there. Give a list, as",
        ),
        ("predict", ["~captioner/quantization"], "Could not delete 'captioner/quantization'"),
    ],
)
def test_hydras_own_errors_are_one_line_of_ours(script, overrides, words):
    with pytest.raises(UserError) as raised, hydras_errors(script):
        compose(script, *overrides)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "+" not in str(raised.value)


def test_a_file_that_puts_a_mapping_over_a_list_is_one_line_with_the_reason(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = "# @package _global_", "defaults: [repair, _self_]", "data: {control: {recipe: {jpeg: 10}}}"
    (tmp_path / "experiment" / "mine.yaml").write_text("\n".join(lines))
    line = r"^In 'experiment/mine': a mapping cannot replace the list"
    with pytest.raises(UserError, match=line) as raised, hydras_errors("train"):
        compose("train", "experiment=mine", f"hydra.searchpath=[{tmp_path}]")
    assert "\n" not in str(raised.value)


def test_yaml_with_a_mistake_names_its_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: 1\nadapter: {rank: [}\n")
    with pytest.raises(UserError, match=r"mine.yaml, line 2: this is not YAML"), hydras_errors("train"):
        yaml.safe_load((tmp_path / "mine.yaml").open())


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.max_time": "00:08:00:00"},
        {"optimizer.amsgrad": True},
        {"callbacks.mine": {"_target_": "callbacks.progress.TrainingProgress", "output_dir": "x"}},
        {"callbacks.mine": {"_target_": "tests.cli.test_check_keys.TakesAny", "every": 1}},
        {"adapter.rank_pattern": {"transformer_blocks.*": 8}},
        {"data.columns": {"control": "before", "prompt": "text"}},
    ],
)
def test_arguments_of_a_class_that_conf_leaves_out_are_accepted(composed, values):
    check_keys(added(composed["train"], values), "train")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainer.max_tme": 1}, "Trainer has no argument max_tme. Did you mean trainer.max_time?"),
        ({"adapter.rank_patern": 1}, "rank_patern: there is no such setting. Did you mean adapter.rank_pattern?"),
        ({"adapter.rank_patern.x": 1}, "there is no such setting. Did you mean adapter.rank_pattern?"),
        ({"callbacks.sample_imags.count": 1}, "Did you mean callbacks.sample_images.count?"),
        ({"callbacks.foo": 1}, "callbacks.foo: there is no such setting. callbacks has "),
        ({"optimizer.bets": [1, 2]}, "optimizer.bets: there is no such setting. Did you mean optimizer.betas?"),
        ({"callbacks.mine": {"_target_": "callbacks.lifecycle.Overfit", "every": 1}}, "Overfit has no argument every."),
        ({"callbacks.mine": {"every": 1}}, "callbacks.mine.every: there is no such setting."),
        ({"mine": {"_target_": "callbacks.lifecycle.Overfit"}}, "mine._target_: there is no such setting."),
        ({"model.quantization": {"format": "fp8"}}, "Choose model/quantization=NAME first: fp4, fp8, int8_w8a8, nf4."),
    ],
)
def test_other_arguments_of_a_class_are_refused(composed, values, words):
    with pytest.raises(UserError) as raised:
        check_keys(added(composed["train"], values), "train")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("task", "override", "words"),
    [
        ("edit", "model.timesteps.shift=9", "no effect with task=edit: it is a setting of train.py"),
        ("edit", "data.root=x", "of task=cache, clean, preview"),
        ("edit", "data=captions", "data has no effect with task=edit"),
        ("edit", "format=kohya", "it is a setting of task=export"),
        ("average", "trainer.devices=2", "trainer.devices has no effect with task=average"),
        ("inspect", "model.sampling.num_inference_steps=3", "has no effect with task=inspect"),
    ],
)
def test_a_setting_that_the_task_does_not_read_is_refused(task, override, words):
    with pytest.raises(UserError, match=words):
        check_read(task, [override])


def test_settings_that_a_task_reads_are_accepted():
    check_read("edit", ["lora=x", "model.devices.vae=cpu", "data.cache_dir=x", "~captioner"])
    check_read("cache", ["data.root=x", "model=flux_kontext", "model/quantization=fp8", "trainer.devices=2"])
    for key, tasks in declared("predict").readers.items():
        assert set(tasks) <= TASKS["predict"].keys(), key


def test_tasks_of_the_other_command_are_named():
    with pytest.raises(UserError, match=r"task=inspect: there is no .* of train.py. It is a task of predict.py."):
        chosen_task("inspect", "train")
    with pytest.raises(UserError, match=r"no such task of train.py. Did you mean dry_run\?"):
        chosen_task("dryrun", "train")


@pytest.mark.parametrize("group", ["callbacks/metrics", "model/quantization"])
def test_null_is_no_choice_for_a_group_whose_default_it_is(group):
    with hydras_errors("train"):
        cfg = compose("train", *read_arguments(["model=flux_kontext_fp4", f"{group}=null"], "train"))
    assert cfg.model.quantization is None or group == "callbacks/metrics"
    check_keys(cfg, "train")


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["data.root=x", "-m", "optimizer.lr=1,2"], ['data.root="x"', "optimizer.lr=1,2", "-m"]),
        (["-m", "data.root=x", "optimizer.lr=1,2"], ['data.root="x"', "optimizer.lr=1,2", "-m"]),
        (["seed=1", "--cfg", "job", "save_every=2"], ["seed=1", "save_every=2", "--cfg", "job"]),
    ],
)
def test_options_and_settings_may_have_any_order(arguments, read):
    assert read_arguments(arguments, "train") == read


def test_command_refuses_keys_of_an_own_file_without_a_folder_or_words_of_hydra(run, tmp_path):
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\nsample_evry: 5\nema: {halflife: 3}\n")
    arguments = ["-cd", str(tmp_path / "conf"), "experiment=mine", f"output_dir={tmp_path / 'out'}"]
    outcome = run("train", *arguments, ok=False)
    assert "Did you mean" in outcome.error
    assert len([line for line in outcome.text.splitlines() if not line.startswith("starting: ")]) == 1
    assert not (tmp_path / "out").exists()
    assert run("train", "--version").text.startswith("retouch ")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_docs_name_only_existing_settings(page):
    for script, rest in re.findall(r"python (train|predict)\.py([^`\n]*)", (ROOT / page).read_text(encoding="utf-8")):
        for key in re.findall(r"(?<=\s)\+*((?!hydra)[a-z_]+(?:[./][a-z_0-9]+)*)=", rest):
            known = declared(script)
            assert key in known.groups or known.knows(key.replace("/", ".")) or known.takes_arguments(key), key
