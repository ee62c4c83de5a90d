"""A page over two small runs, as a browser with the token sees it."""

import csv

import pytest
from omegaconf import OmegaConf
from PIL import Image
from starlette.testclient import TestClient

from extras.page.app import create_app
from report.images import Strip
from runs.run_folder import RunFolder

TOKEN = "the token"
BASE = "http://127.0.0.1:7860"
SECRET = "not for the page"


def contents(folder):
    """Return the content of each file below a folder, by its path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_run(folder, steps: int, prompt: str, **settings) -> RunFolder:
    """Write the files of a run by which the page shows it."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True)
    OmegaConf.save(
        OmegaConf.create({"model_name": "embedded", "trainer": {"max_steps": steps}, **settings}), run.config
    )
    with run.metrics.open("w", newline="") as file:
        names = ["step", "loss", "loss_avg", "samples_per_second", "peak_memory_gb", "seconds"]
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([[step, 1 / step, 1 / step, 2.0, 1.0, step] for step in range(1, steps + 1)])
    colours = ("red", "green", "blue")
    images = [Image.new("RGB", (16, 16), colour) for colour in colours]
    for step in (0, steps):
        Strip(images[:1], images[1], images[2], prompt).write(run.samples_of(step) / "one.png")
    return run


@pytest.fixture
def outputs(tmp_path):
    """Return the folder of the runs, next to a file that the page must never show."""
    (tmp_path / "secret.txt").write_text(SECRET)
    write_run(tmp_path / "outputs/first", 4, "make it snow", optimizer={"lr": 0.1})
    write_run(tmp_path / "outputs/sweep/0", 8, "make it rain", optimizer={"lr": 0.2})
    return tmp_path / "outputs"


@pytest.fixture
def client(outputs):
    """Return a client that has opened the page with its token."""
    with TestClient(create_app(TOKEN, outputs=outputs), BASE) as client:
        client.get("/", params={"token": TOKEN})
        yield client
        client.post("/try/stop", data={"memory": "1"})  # a process that a test has started
