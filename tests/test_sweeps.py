"""Several runs of one command."""

import csv
import re

import pytest

from tests.support.commands import metrics, short


def test_sweep_leaves_a_table(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "sweep", 3)
    swept = ["optimizer.lr=1e-4,1e-3", "scheduler=linear"]
    text = run("train", "-m", *arguments, *swept).text
    rates = ("0.0001", "0.001")
    for number, rate in enumerate(rates):
        assert re.search(rf"job {number}: .* optimizer.lr={rate} scheduler=linear\n", text)
        assert re.search(rf"learns by +AdamW, lr {rate}, schedule linear ", text)
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["overrides"] for row in rows] == ["optimizer.lr=0.0001", "optimizer.lr=0.001"]
    for number, row in enumerate(rows):
        assert (tmp_path / "sweep" / str(number) / "lora" / "last").samefile(row["lora"])
        assert float(row["final_loss"]) == float(metrics(tmp_path / "sweep" / str(number))[-1]["loss_avg"])
        assert float(row["seconds"]) > 0


def test_sweep_keeps_one_model_in_memory_and_goes_on_after_a_failing_job(run, tiny, pairs, tmp_path):
    import gc

    from lightning_modules.families.flux.module import FluxKontext

    arguments = short(tiny, pairs, tmp_path / "sweep", 2)
    outcome = run("train", "-m", *arguments, "adapter.rank=4,0,2", ok=False)
    alive = [o for o in gc.get_objects() if type(o) is FluxKontext]
    assert alive == []
    assert outcome.status == 1
    assert "adapter.rank=0: must be a whole number" in outcome.text
    assert "Traceback" not in outcome.text
    rows = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert [bool(row["error"]) for row in rows] == [False, True, False]


@pytest.mark.slow
def test_jobs_of_a_sweep_do_not_upload_to_one_repository(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "sweep", 2)
    outcome = run("train", "-m", *arguments, "optimizer.lr=1e-4,1e-3", "hub.push=me/snow", ok=False)
    assert "hub.push=me/snow: the jobs of a sweep would replace each other's weights there" in outcome.text
    own = "hub.push='me/snow-${hydra:job.num}'"
    outcome = run("train", "-m", *arguments, "optimizer.lr=1e-4,1e-3", own, ok=False)
    assert "hub.push=me/snow-1: it needs the network" in outcome.text
