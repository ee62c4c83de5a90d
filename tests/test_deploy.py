"""The files of deploy/ and the commands of docs/clusters.md fit the settings, Slurm's rules and each other."""

import contextlib
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from cli.arguments import quote_values, read_arguments
from tests.support.commands import ROOT, compose

DEPLOY = ROOT / "deploy"
SBATCH = sorted((DEPLOY / "slurm").glob("*.sbatch"))
SKYPILOT = DEPLOY / "skypilot.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
ENTRYPOINT = DEPLOY / "entrypoint.sh"
PAGES = [ROOT / "docs" / "clusters.md", DEPLOY / "runpod.md"]

# Stands in for srun, torchrun and python: prints which of our scripts would get which arguments.
SHOW = """#!/bin/sh
until [ "${1%.py}" != "$1" ]; do shift; done
printf '%s\\0' "$(basename "$1")"
shift
printf '%s\\0' "$@"
printf '\\n'
"""


def arguments_of(script, folder, *given, name="train.py", **environment):
    """Return the arguments that a shell script gives to train.py, or to predict.py."""
    for launcher in ("srun", "torchrun", "python"):
        (folder / launcher).write_text(SHOW)
        (folder / launcher).chmod(0o755)
    (folder / "aws").write_text('#!/bin/sh\necho "$@" >> aws.txt\n')
    (folder / "aws").chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **environment}
    command = ["bash", "-euc", script, "script", *given]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = [line.split("\0")[:-1] for line in done.stdout.splitlines()]
    return next(arguments for script, *arguments in calls if script == name)


def composed(name, arguments):
    """The config that a command line gives; of a sweep, that of its first job."""
    if any(one.startswith("hydra/launcher=") for one in arguments):
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    arguments = quote_values([one for one in arguments if one != "-m"])
    parser = OverridesParser.create()
    for place, one in enumerate(map(parser.parse_override, arguments)):
        if one.is_sweep_override():
            arguments[place] = f"{one.key_or_group}={next(one.sweep_string_iterator())}"
    return compose(name, *arguments)


def directives(path):
    """The options for Slurm that stand in a file."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(lines)


def example(path):
    """The settings of the command at the head of a file for Slurm."""
    [settings] = re.findall(rf"^# +sbatch .*deploy/slurm/{path.name} (.*)$", path.read_text(), re.MULTILINE)
    return shlex.split(settings)


def commands(code):
    """The command lines of train.py and predict.py in lines for a shell: name and settings of each."""
    words = shlex.shlex(code.replace("\\\n", " "), posix=True, punctuation_chars=True)
    words.whitespace_split = True
    words, found = list(words), []
    for place, word in enumerate(words):
        if re.search(r"\b(train|predict)(\.py)? ", word):  # a quoted command, as that of sh -c
            found += commands(f"retouch {word}")
        name = re.fullmatch(r"(?:!?(retouch)-)?(train|predict)(\.py)?|.*\.sbatch", word)
        if name and (name[1] or name[3] or not name[2] or words[place - 1] == "retouch"):
            settings = itertools.takewhile(lambda one: "=" in one or one == "-m", words[place + 1 :])
            found.append((name[2] or "train", [*settings, *([] if name[2] else ["resume=auto"])]))
    return found


def commands_of(page):
    blocks = re.findall(r"(?:^ {4,}.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [found for block in blocks for found in commands(block)]


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_job_is_warned_comes_back_and_keeps_its_log(path):
    options = directives(path)
    assert "requeue" in options
    assert options["open-mode"] == "append"
    # "B:" would warn the script, which does not pass it on.
    assert re.fullmatch(r"USR1@\d+", options["signal"])
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    # Slurm reads no option behind the first command.
    script = path.read_text(encoding="utf-8")
    assert script.rindex("#SBATCH") < script.index("set -euo pipefail")


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_job_trains_with_settings_that_exist_on_what_it_asks_for(path, tmp_path):
    options = directives(path)
    environment = {
        "SLURM_NNODES": options["nodes"],
        "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    spaces = "model.x=a, b"
    given = arguments_of(path.read_text(), tmp_path, *example(path), spaces, **environment)
    cfg = composed("train", [one for one in given if one != spaces])
    assert spaces in given
    assert [cfg.trainer.num_nodes, cfg.trainer.devices] == [int(options["nodes"]), int(options["ntasks-per-node"])]
    assert cfg.trainer.strategy == ("ddp" if cfg.trainer.devices > 1 else "auto")
    assert cfg.resume == "auto"
    assert cfg.output_dir == "outputs/snow"


def skypilot():
    return yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))


def test_spot_job_requests_the_settings_of_its_command():
    job = skypilot()
    assert job["resources"]["use_spot"]
    [line] = re.findall(r"^# +(sky jobs launch .*)$", SKYPILOT.read_text(encoding="utf-8"), re.MULTILINE)
    words = shlex.split(line)
    given = {words[place + 1].partition("=")[0] for place, word in enumerate(words) if word in ("--env", "--secret")}
    assert given == {name for group in ("envs", "secrets") for name, value in job[group].items() if value is None}
    for step in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=job[step], text=True, check=True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_spot_job_trains_with_settings_that_exist(nodes, tmp_path):
    job = skypilot()
    environment = {name: value for name, value in job["envs"].items() if value is not None}
    environment |= {"BUCKET": "s3://my-bucket", "RUN": "snow"}
    environment |= {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "0"}
    environment["SKYPILOT_NODE_IPS"] = "\n".join(["10.0.0.1", "10.0.0.2"][:nodes])
    encoding, training = (
        composed(name, arguments_of(job["run"], tmp_path, name=f"{name}.py", **environment))
        for name in ("predict", "train")
    )
    assert encoding.task == "cache"
    assert encoding.data.cache_dir == "s3://my-bucket/cache"
    # Pairs are copied to the disk; nothing is trained into a mounted bucket.
    [place] = job["file_mounts"]
    assert encoding.data.root == place.replace("~", str(tmp_path))
    assert training.data.shards == "s3://my-bucket/cache/FINGERPRINT"
    assert training.data.root is None
    assert training.resume == "auto"
    assert training.output_dir == "outputs/snow"
    assert "s3://my-bucket/runs/snow outputs/snow\n" in (tmp_path / "aws.txt").read_text()


def test_image_gets_all_that_training_needs():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    parts = project["tool"]["setuptools"]
    installed = {name.removesuffix("*") for name in parts["packages"]["find"]["include"]}
    installed |= {f"{name}.py" for name in parts["py-modules"]}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*"
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert kept == installed | {"deploy/entrypoint.sh", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()
    [python] = re.findall(r"^ARG PYTHON=python:(\d+\.\d+)\.\d+-", DOCKERFILE, re.MULTILINE)
    assert project["project"]["requires-python"] == f">={python}"


def test_image_is_built_only_if_it_trains():
    """Its last stage takes a file from the stage that trains, with settings that exist."""
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM") :]
    assert "COPY --from=smoke /tmp/run/" in last
    for name in ("train", "predict"):
        [line] = re.findall(rf"entrypoint.sh {name} (.*)", DOCKERFILE.replace("\\\n", " "))
        cfg = composed(name, shlex.split(line))
        assert cfg.trainer.accelerator == "cpu"
        assert cfg.output_dir.startswith("/tmp/")


def test_image_runs_train_predict_and_any_other_command(tmp_path):
    for name in ("train", "predict", "studio"):
        (tmp_path / f"retouch-{name}").write_text('#!/bin/sh\nprintf \'%s\\n\' "${0##*/}" "$@"\n')
        (tmp_path / f"retouch-{name}").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def told(*words):
        return subprocess.check_output([ENTRYPOINT, *words], env=environment, text=True).splitlines()

    for name in ("train", "predict"):
        assert told(name, "a=b c", "-m") == [f"retouch-{name}", "a=b c", "-m"]
    assert told("studio", "token=x") == ["retouch-studio", "host=0.0.0.0", "open=false", "token=x"]
    compose("studio", "host=0.0.0.0", "open=false")
    assert told("echo", "train") == ["train"]


def test_the_key_of_the_image_has_a_volume_of_its_own_in_which_others_replace_nothing():
    [state] = re.findall(r"XDG_STATE_HOME=(\S+)", DOCKERFILE)
    volumes = json.loads(re.search(r"^VOLUME (.+)$", DOCKERFILE, re.MULTILINE)[1])
    assert [one for one in volumes if f"{state}/".startswith(f"{one}/") or one.startswith(f"{state}/")] == [state]
    assert 'chmod 1777 "$XDG_STATE_HOME"' in DOCKERFILE
    page = (ROOT / "docs/clusters.md").read_text().replace("\\\n", " ")
    for command in re.findall(r"docker run [^`]*? retouch (?:train|studio)", page):
        assert re.search(rf"-v\s+retouch-key:{state} ", command), command


def test_tokens_in_the_docs_are_long_enough():
    from extras.page.app import SHORTEST_TOKEN

    texts = [path.read_text() for path in (*ROOT.glob("docs/*.md"), *DEPLOY.glob("*.md"), ROOT / "README.md")]
    shown = {token for text in texts for token in re.findall(r"\btoken=(\w+)", text)}
    assert shown
    assert all(len(token) >= SHORTEST_TOKEN for token in shown)


def test_each_file_of_another_project_has_its_version_and_its_license_beside_it():
    files = [path for top in ("extras", "report") for path in (ROOT / top).rglob("*.min.*")]
    assert len(files) == 4
    for file in files:
        name = file.name.split(".")[0]
        [row] = re.findall(rf"^\| {name}[\w.]* \| \d+\.\d+\.\d+ \|.*$", file.with_name("README.md").read_text(), re.M)
        assert f"(LICENSE.{name})" in row
        assert file.with_name(f"LICENSE.{name}").stat().st_size > 500


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(*found, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, found in enumerate(commands_of(page), start=1)
    ],
)
def test_commands_of_the_pages_have_settings_that_exist(name, arguments):
    cfg = composed(name, arguments)
    if name == "train":
        assert cfg.resume == "auto"
        assert cfg.output_dir


def test_notebook_has_no_results_and_commands_with_settings_that_exist():
    notebook = json.loads((DEPLOY / "colab.ipynb").read_text(encoding="utf-8"))
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("nbformat").validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"], len(notebook["cells"])) == (4, 5, 10)
    found = []
    for cell in notebook["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            lines = [line for line in cell["source"] if line.startswith(("!retouch-", "!python "))]
            found += commands("\n".join(lines))
    assert len(found) == 4
    for name, settings in found:
        assert composed(name, read_arguments(settings, name)).task in ("inspect", "dry_run", "fit", "edit")
