"""The tab Start: the form, the command, the dry run, and the queue."""

import errno
import html
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from starlette.datastructures import FormData

from cli.arguments import read_values
from extras.page.jobs import Jobs
from extras.page.plans import Plans
from extras.page.runs import Shelf, state_of
from extras.page.start import arguments_of, asked_by
from foundation.errors import UserError
from foundation.locks import holder, lock_content
from runs.run_folder import RunFolder
from tests.extras.page.browsing import browser_page, studio_at
from tests.extras.page.conftest import write_run
from tests.support.commands import compose, wait_until

QUICK = ["trainer.max_steps=2", "trainer.accelerator=cpu", "data.num_workers=0", "data.val_root=null"]


def fields(text):
    """Return the value and the placeholder of each text field of the form."""
    inputs = re.findall(r'<input name="([\w./]+)"[^>]*? value="([^"]*)"[^>]*? placeholder="([^"]*)"[^>]*>', text)
    return {name: (html.unescape(value), html.unescape(default)) for name, value, default in inputs}


def shown_command(client, **form):
    answer = client.post("/start", data=form, headers={"hx-request": "true"})
    return html.unescape(re.search('<pre id="command">(.*?)</pre>', answer.text)[1])


def test_form_has_the_defaults_of_the_choices_and_the_comments_of_conf(client):
    before = client.get("/start").text
    after = client.post("/start/form", data={"model": "flux_kontext", "adapter": "dora"}).text
    assert fields(before)["trainer.max_steps"][1] == "100"
    assert fields(after)["trainer.max_steps"][1] == "2000"
    assert '<option value="dora" selected>dora</option>' in after
    assert "Also train on each sample mirrored." in before, "the comment above data.flip"
    assert "there is no such choice" in client.post("/start/form", data={"model": "nonsense"}).text


def test_every_text_field_shows_the_default_of_its_setting(client):
    """Typed in, all of them change nothing."""
    form = re.sub("; 4 of 20 are a good start", "", client.get("/start").text)
    shown = {name: default for name, (value, default) in fields(form).items() if not value and name != "memory"}
    usual = {"data.resolution", "data.batch_size", "adapter.rank", "adapter.alpha", "optimizer.lr"}
    assert shown.keys() >= usual | {"trainer.max_steps", "ema.half_life", "save_every", "sample_every", "data.shards"}
    typed = read_values([f"{name}={default}" for name, default in shown.items()], "train")
    expected, found = (compose("train", "output_dir=x", *one) for one in ([], typed))
    assert OmegaConf.to_container(found, resolve=True) == OmegaConf.to_container(expected, resolve=True)


def test_command_is_what_the_form_says_word_for_word(client, outputs):
    text = shown_command(
        client,
        **{"output_dir": f"{outputs}/new", "model": "embedded", "data.root": "my $(touch x) pairs", "more": "seed=3"},
    )
    words = ["model=embedded", "data.root=my $(touch x) pairs", "seed=3", f"output_dir={outputs}/new"]
    assert shlex.split(text) == ["python", "train.py", *words]
    assert f"output_dir={outputs}/first-2" in shown_command(client, output_dir=f"{outputs}/first"), "first is taken"


def test_a_name_is_enough_and_a_model_for_photographs_needs_images(client, outputs):
    assert shown_command(client, output_dir="new").endswith(f"output_dir={outputs}/new")
    answer = client.post("/start", data={"model": "z_image", "output_dir": "new"}, headers={"hx-request": "true"})
    assert "Choose a folder of images, in step 1." in answer.text
    assert "data.root=photos" in shown_command(client, model="z_image", output_dir="new", **{"data.root": "photos"})


def test_another_model_chooses_the_first_format_that_fits_the_card_and_another_goal_its_own_model(client):
    chosen = {"model": "flux2_klein_4b", "model_before": "", "memory": "12", "data.root": "photos"}
    answer = client.post("/start/form", data=chosen)
    assert '<option value="fp8" selected>' in answer.text
    assert answer.headers["hx-trigger"] == "chosen", "else the command would be that before the choice"
    assert '<option value="fp8" selected>' not in client.post("/start/form", data={**chosen, "memory": "24"}).text
    goal = client.post("/start/form", data={**chosen, "experiment": "style", "goal_before": ""}).text
    assert re.search(r'value="" checked> <b>z_image</b>', goal), "without model= in the command"


def test_time_is_that_of_a_run_with_equal_steps(client, outputs):
    for name, steps in (("short", 4), ("long", 30)):
        settings = {**OmegaConf.to_container(compose("train")), "model_name": "embedded"}
        write_run(outputs / name, steps, "make it snow", **settings)
    answer = client.post("/start", data={"output_dir": "new", "trainer.max_steps": "3000"})
    assert "at the speed of long." in answer.text
    assert "at the speed" not in client.post("/start", data={"output_dir": "new", "data.resolution": "64"}).text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"more": "-cp /tmp"}, "is not accepted here"),
        ({"more": "--config-dir=/tmp"}, "is not accepted here"),
        ({"more": "hydra.run.dir=/tmp"}, "is not accepted here"),
        ({"more": "+hydra/launcher=submitit_local"}, "is not accepted here"),
        ({"more": "data@hydra.env=pairs"}, "is not accepted here"),
        ({"more": "task=export"}, "is not accepted here"),
        ({"more": "output_dir=/tmp/x"}, "is not accepted here"),
        ({"more": "notify=json://secret"}, "is not accepted here"),
        ({"data.root": "a\0b"}, "is not accepted here"),
        ({"more": "adapter.rnk=3"}, "Did you mean adapter.rank?"),
        ({"more": "words"}, "it is not KEY=VALUE"),
        ({"output_dir": "../elsewhere"}, "it is not below"),
        ({"output_dir": "{outputs}/../elsewhere"}, "it is not below"),
        ({"output_dir": "{outputs}/.queue"}, "it is not below"),
        ({"output_dir": "{outputs}"}, "it is not below"),
        ({"output_dir": "s3://bucket/run"}, "it is not below"),
    ],
)
@pytest.mark.parametrize("when", ["now", "next"])
def test_form_starts_nothing_else_and_nowhere_else(client, outputs, form, words, when):
    form = {"output_dir": f"{outputs}/new", "when": when, **form}
    form["output_dir"] = form["output_dir"].format(outputs=outputs)
    answer = client.post("/start", data=form, headers={"hx-request": "true"})
    assert answer.status_code == 400
    assert words in html.unescape(answer.text)
    assert "\n" not in answer.text
    assert {path.name for path in outputs.iterdir()} == {"first", "sweep"}


def test_run_is_filled_in_again_with_the_settings_that_differ_without_secrets(client, outputs):
    given = ["adapter=tlora", "adapter.rank=4", "logger=none", "callbacks.report=null", "seed=3", "data.flip=true"]
    given += ["data.prefix='a, \"b\"'", "data.root=[{path:mine,repeats:3}]", "optimizer.betas=[0.8,0.9]"]
    given += ["adapter.alpha_pattern={to_*:8}", "data.shards=https://me:password@host/cache", "+trainer.fast_dev_run=2"]
    given += ["+logger.x.api_key=k"]
    cfg = compose("train", *given)
    choices = HydraConfig.get().runtime.choices
    settings = {**OmegaConf.to_container(cfg), "model_name": "embedded", "hydra": {"runtime": {"choices": choices}}}
    write_run(outputs / "third", 4, "make it snow", **settings)
    asked = asked_by(RunFolder(outputs / "third"))
    assert "password" not in str(asked)
    assert "api_key" not in str(asked)
    again = compose("train", *read_values(arguments_of(FormData(asked)), "train"))
    expected = compose("train", *(one for one in given if "api_key" not in one and "password" not in one))
    assert again == expected
    fields_of_run = {"adapter.rank", "data.root", "data.flip", "data.prefix"}
    assert asked.keys() == {"model", "adapter", "logger", "more", *fields_of_run}
    assert 'name="adapter.rank" value="4" placeholder="16"' in client.get("/start?run=third").text
    assert client.get("/start?run=nowhere").status_code == 404
    assert asked_by(RunFolder(outputs / "first"))["model"] == "embedded", "of a run without recorded choices"


@pytest.mark.parametrize(
    "text", ["sks dog", 'a, "b"', '"all of it"', "in the style of X, ", "[a]", "5", "null", "\u00e9", "1e3"]
)
def test_texts_of_a_run_come_back_through_the_form_as_they_are(outputs, text):
    settings = OmegaConf.to_container(compose("train"))
    settings["data"]["prefix"] = settings["data"]["trigger_word"] = text
    write_run(outputs / "third", 4, "make it snow", **{**settings, "model_name": "embedded"})
    again = compose("train", *read_values(arguments_of(FormData(asked_by(RunFolder(outputs / "third")))), "train"))
    assert (again.data.prefix, again.data.trigger_word) == (text, text)


@pytest.fixture
def busy(outputs):
    """Make the first run look like one that runs, by a process with the name of a command."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "train.py"])
    (outputs / "first/.lock").write_bytes(lock_content(process.pid))
    yield process
    process.kill()
    process.wait()


def test_a_process_that_is_just_starting_uses_its_folder(outputs, busy, monkeypatch):
    """Linux shows no command line between the end of `Popen` and the program: 1 of 10 times, under load."""
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])
    assert Jobs(outputs, lambda: None)._is_busy()
    with pytest.raises(UserError, match="is in use by another command"):
        Jobs(outputs, lambda: None).start([], RunFolder(outputs / "first"))


def test_queue_outlives_the_page_and_is_reordered(client, outputs, busy):
    for name in ("a", "b", "c"):
        form = {"output_dir": f"{outputs}/{name}", "when": "next", "adapter.rank": "4"}
        assert client.post("/start", data=form).headers["hx-trigger"] == "queued"
    for name, change in (("c", "first"), ("a", "remove"), ("started since", "remove")):
        client.post("/queue", data={"run": f"{outputs}/{name}", "change": change})
    jobs = Jobs(outputs, lambda: None)
    jobs.start_next()
    assert [Path(folder).name for folder in jobs.waiting()] == ["c", "b"], "none starts while another one runs"
    text = html.unescape(client.get("/start").text)
    assert f"adapter.rank=4 output_dir={outputs}/c; python train.py adapter.rank=4 output_dir={outputs}/b" in text
    with jobs.changing() as waiting:
        waiting.clear()  # else they start when the other one has ended


@pytest.mark.slow
def test_several_pages_start_each_run_once_one_after_the_other_also_after_a_failure(outputs):
    freed = []
    pages = [Jobs(outputs, lambda: freed.append(1)) for _ in range(4)]
    with pages[0].changing() as waiting:
        waiting.update({str(outputs / name): ["adapter.rank=0", f"output_dir={outputs / name}"] for name in "abc"})
    runs, running = [RunFolder(outputs / name) for name in "abc"], 0
    end = time.monotonic() + 120
    while pages[0].waiting() or any(holder(run.path) for run in runs):
        assert time.monotonic() < end
        with ThreadPoolExecutor() as pool:
            list(pool.map(Jobs.start_next, pages))
        running = max(running, sum(holder(run.path) is not None for run in runs))
    assert running == 1
    assert len(freed) == 3
    for run in runs:
        assert run.log.read_text().count("error: adapter.rank=0: must be a whole number from 1 on") == 1


@pytest.mark.parametrize("full", ["waiting.json", ".lock"])
def test_a_full_disk_ends_no_prediction_and_starts_no_run(outputs, monkeypatch, full):
    monkeypatch.setattr(Jobs, "_watch", lambda jobs: None)
    freed, new = [], outputs / "new"
    jobs = Jobs(outputs, lambda: freed.append(1))
    with jobs.changing() as waiting:
        waiting[str(new)] = ["adapter.rank=0", f"output_dir={new}"]

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if full == "waiting.json":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr("extras.page.jobs.lock_content", fail)
    for _ in range(2):
        with suppress(UserError):
            jobs.start_next()
    monkeypatch.undo()
    assert not freed
    assert not (new / "log.txt").exists() or not (new / "log.txt").read_text()
    assert jobs.waiting().keys() == {str(new)}


@pytest.mark.parametrize("content", ["[1]", '{"outputs/x": 5}', "{", "null"])
def test_a_damaged_queue_is_named(client, outputs, content):
    (outputs / ".queue").mkdir()
    (outputs / ".queue/waiting.json").write_text(content)
    assert "waiting.json is damaged" in client.get("/start").text


def test_a_run_is_not_started_twice_at_once(outputs):
    run, jobs = RunFolder(outputs / "first"), Jobs(outputs, lambda: time.sleep(0.1))
    arguments = ["nothing=here"]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [one.exception() for one in [pool.submit(jobs.start, arguments, run) for _ in range(2)]]
    assert sorted(map(bool, outcomes)) == [False, True]
    assert "is in use" in str(next(filter(None, outcomes)))


def test_estimates_run_one_at_a_time_and_the_others_wait_in_their_order(outputs):
    processes = {}

    class Held(Jobs):
        def start(self, arguments, run, script="train"):
            assert all(one.poll() is not None for one in processes.values()), "one at a time"
            run.path.mkdir(parents=True)
            run.log.touch()
            command = [sys.executable, "-c", "input()", "train"]
            processes[arguments[0]] = process = subprocess.Popen(command, stdin=subprocess.PIPE)
            (run.path / ".lock").write_bytes(lock_content(process.pid))
            return process

    plans = Plans(Held(outputs, lambda: None), outputs / ".plans")
    settings = [f"seed={number}" for number in range(6)]
    keys = [plans.start([one], again=one == settings[2]) for one in [*settings, *settings]]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda one: plans.start([one], True), settings)) == keys[:6]
    assert [*processes] == settings[:1]
    shown = [plans.state(key)["now"] for key in keys]
    assert shown == (["starting"] + ["waiting for another estimate"] * 5) * 2
    for number in range(1, 7):
        processes[settings[number - 1]].communicate(b"\n")
        plans.state(keys[3])  # whichever page looks
        assert [*processes] == settings[: number + 1]


def estimated(client, **form):
    """Start an estimate, and return its key and the page when it has ended."""
    text = client.post("/plan", data=form, headers={"hx-request": "true"}).text
    while found := re.search(r"/plan\?key=(\w+)", text):
        assert re.search(r"\d+ s so far", text)
        time.sleep(0.2)
        text = client.get(found[0], headers={"hx-request": "true"}).text
    return html.unescape(re.sub("<.*?>", "", text))


@pytest.mark.slow
def test_estimate_is_the_dry_run_of_the_command_line_with_progress_and_is_kept(client, run, tmp_path):
    mistake = run("train", "data.root=nowhere", f"output_dir={tmp_path / 'x'}", "task=dry_run", ok=False).error
    assert mistake == f"error: {estimated(client, **{'data.root': 'nowhere'})}".rstrip()
    text = estimated(client, **{"adapter.rank": "4"})
    assert "LoRA rank 4" in text
    assert all(name in text for name in ("time", "disk", "memory of the card"))
    start = time.monotonic()
    assert estimated(client, **{"adapter.rank": "4"}) == text, "kept by its settings"
    assert time.monotonic() - start < 1
    running = client.post("/plan", data={"adapter.rank": "5"}, headers={"hx-request": "true"}).text
    assert re.search(r"the last ones took \d+ s", running)


@pytest.mark.slow
def test_form_in_a_browser_shows_starts_and_queues_runs(tmp_path):
    with studio_at(tmp_path) as address:
        with suppress(AssertionError), browser_page(address) as page:  # at its end: a mistake's status in the console
            page.goto(f"{address.partition('?')[0]}start")
            page.locator("#command").wait_for()
            page.get_by_text("Expert").click()
            page.locator("[name=more]").press_sequentially("adapter.rnk=3")
            page.locator("#command-of").get_by_text("Did you mean adapter.rank?").wait_for()
            page.locator("[name=more]").fill("adapter.rank=0")
            page.get_by_role("button", name="estimate memory and time").click()
            page.locator("#plan").get_by_text("adapter.rank=0: must be a whole number from 1 on").wait_for()
        use_form(address, tmp_path / "outputs")


def use_form(address, outputs):
    with browser_page(address, viewport={"width": 390, "height": 844}) as page:
        page.get_by_role("link", name="Start", exact=True).click()
        page.locator("#search").fill("rank")
        page.locator("[name='adapter']").evaluate("one => one.closest('details').open")
        page.locator("#search").fill("")
        page.get_by_text("Adapter", exact=True).click()
        page.locator("[name='adapter']").select_option("tlora")
        page.locator("[name='adapter.rank']").fill("4")
        page.locator("[name='output_dir']").fill("outputs/one")
        page.get_by_text("Expert").click()
        page.locator("[name=more]").fill("\n".join(QUICK))
        page.get_by_text(QUICK[-1]).first.wait_for()
        page.get_by_role("button", name="estimate memory and time").click()
        page.locator("#plan").get_by_text("all of the estimate").click()
        page.get_by_text("T-LoRA rank 1 to 4").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        command = page.locator("#command").inner_text()
        assert shlex.split(command)[2:] == ["adapter=tlora", "adapter.rank=4", *QUICK, "output_dir=outputs/one"]
        page.get_by_role("button", name="copy the command").click()
        assert page.evaluate("getSelection().toString()") == command
        page.get_by_role("button", name="add to the queue").click()
        page.get_by_text("output_dir=outputs/one-2").first.wait_for()
        page.locator("[name='output_dir']").fill("outputs/two")
        page.get_by_text("output_dir=outputs/two").wait_for()
        page.get_by_role("button", name="add to the queue").click()
        page.get_by_role("heading", name="Queue").wait_for()
        page.get_by_role("link", name="Runs").click()
        page.get_by_text("finished").nth(1).wait_for()
        assert Shelf(outputs).runs().keys() == {"one", "two"}
        page.get_by_role("link", name="one", exact=True).click()
        page.get_by_role("link", name="run again").click()
        assert page.locator("[name='adapter']").input_value() == "tlora"
        assert page.locator("[name='adapter.rank']").input_value() == "4"
        assert page.locator("[name='trainer.max_steps']").input_value() == "2"
        page.get_by_role("button", name="start", exact=True).click()
        page.get_by_text("running").wait_for()
        page.locator(".log").get_by_text("starting: importing PyTorch").wait_for()
    [started] = [run for name, run in Shelf(outputs).runs().items() if name not in ("one", "two")]
    wait_until(lambda: state_of(started) != "running", seconds=120)
    assert state_of(started) == "finished", started.log.read_text()
