"""Several runs of one command."""

import gc
import pickle
import re

import pytest

from cli.arguments import hydras_errors
from cli.terminal import FailedJob
from foundation.errors import UserError
from lightning_modules.families.flux.module import FluxKontext
from tests.callbacks.test_report import Page
from tests.support.commands import metrics, short
from tests.support.gallery import SHOWN


@pytest.mark.slow
def test_sweep_writes_a_table_and_a_page_with_the_best_first_and_continues_after_a_failing_job(
    run, tiny, pairs, tmp_path
):
    """Only one model is in memory at a time."""
    folder = tmp_path / "sweep"
    more = [*SHOWN, "monitor=psnr", "scheduler=linear", "save_every=0"]
    swept = "optimizer.lr=1e-6,1e-1,-1"
    outcome = run("train", "-m", *short(tiny, pairs, folder, 2, shown=True), *more, swept, ok=False)
    assert not [one for one in gc.get_objects() if type(one) is FluxKontext]
    assert outcome.status == 1
    assert "Traceback" not in outcome.text
    rates = ["1e-06", "0.1", "-1"]
    for number, rate in enumerate(rates):
        assert re.search(rf"job {number}: .* optimizer.lr={rate} scheduler=linear", outcome.text)
    rows = metrics(folder, "sweep.csv")
    assert [row["overrides"] for row in rows] == [f"optimizer.lr={rate}" for rate in rates]
    assert [bool(row["error"]) for row in rows] == [False, False, True]
    for number, row in enumerate(rows[:2]):
        assert (folder / str(number) / "lora" / "last").samefile(row["lora"])
        assert float(row["final_loss"]) == float(metrics(folder / str(number))[-1]["loss_avg"])
        assert float(row["seconds"]) > 0

    page = Page(folder / "report.html")
    *measured, last = re.findall(r"<td[^>]*>(failed|\d+\.\d+)</td>", page.text)
    assert len(measured) == 2
    assert measured == sorted(measured, key=float, reverse=True)
    assert last == "failed"
    assert [url for url in page.pictures if url.startswith("data:image/")] == page.pictures != []
    assert str(tmp_path) not in page.text
    assert sorted(page.links) == ["0/report.html", "1/report.html"]
    assert all((folder / link).is_file() for link in page.links)
    best = page.links[0].partition("/")[0]
    said = r"best of 3 jobs so far: psnr (\S+) with optimizer.lr=(\S+) in (\S+); all of them: (\S+)"
    lines = re.findall(said, outcome.text)
    assert lines == [(measured[0], rates[int(best)], str(folder / best), str(folder / "report.html"))]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task=dry_run", "optimizer.lr=1e-4,1e-3"], "task=dry_run plans one run"),
        (["optimizer.lr=-1,-2"], "optimizer.lr=-"),
        (["data.root=/nowhere,/none"], "data.root=/n"),
    ],
)
def test_a_failed_job_of_a_sweep_is_one_line_of_ours(run, tiny, pairs, tmp_path, settings, words):
    outcome = run("train", "-m", *short(tiny, pairs, tmp_path / "sweep", 1), *settings, ok=False)
    assert outcome.status == 1
    lines = [line for line in outcome.text.splitlines() if words in line and not line.startswith("job ")]
    assert len(lines) == 2, outcome.text
    assert all(line.startswith(f"error: {words}") for line in lines)
    assert "Error executing" not in outcome.text
    assert "Traceback" not in outcome.text


def test_the_failure_of_a_job_on_another_machine_is_still_to_be_printed(capsys):
    with pytest.raises(SystemExit), hydras_errors("train"):
        raise FailedJob("data.root=x: no such folder")
    with pytest.raises(UserError, match=r"^data\.root=x: no such folder$"), hydras_errors("train"):
        raise pickle.loads(pickle.dumps(FailedJob("data.root=x: no such folder")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ([], "hydra/launcher=slurm: this machine has no sbatch. Start it on Slurm's login node."),
        (["srun", "sbatch"], "sbatch: error: invalid partition: "),
        (["sbatch"], 'Could not detect "srun"'),
    ],
)
def test_slurm_that_is_absent_or_refuses_is_one_line(run, tiny, pairs, tmp_path, monkeypatch, programs, words):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    for program in programs:
        (tmp_path / program).write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    arguments = [*short(tiny, pairs, tmp_path / "sweep", 2), "hydra/launcher=slurm", "optimizer.lr=1e-4,1e-3"]
    outcome = run("train", "-m", *arguments, ok=False)
    assert outcome.error.startswith(f"error: {words}")
    assert ("jobs are queued" in outcome.text) == bool(programs)


@pytest.mark.slow
def test_jobs_of_a_sweep_do_not_upload_to_one_repository(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "sweep", 2)
    outcome = run("train", "-m", *arguments, "optimizer.lr=1e-4,1e-3", "hub.push=me/snow", ok=False)
    assert "hub.push=me/snow: the jobs of a sweep would replace each other's weights there" in outcome.text
    own = "hub.push='me/snow-${hydra:job.num}'"
    arguments = short(tiny, pairs, tmp_path / "other", 2)  # errors of this process keep the first one's lock
    outcome = run("train", "-m", *arguments, "optimizer.lr=1e-4,1e-3", own, ok=False)
    assert "hub.push=me/snow-1: it needs the network" in outcome.text
