"""The tab Runs: the list, a run, runs compared, and the buttons."""

import html
import json
import os
import re
import shlex
import time

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import Image
from starlette.testclient import TestClient

from cli.arguments import read_arguments
from extras.page.app import create_app
from extras.page.jobs import Jobs
from extras.page.progress import mean_of_schedule, time_left
from extras.page.runs import Shelf, state_of
from lightning_modules.adapters.rank_schedule import RankSchedule
from report.images import read_strip
from report.tables import last_metrics, read_metrics
from runs.config_file import write_config
from tests.extras.page.conftest import BASE, write_run


def test_list_shows_each_run_of_outputs_and_of_sweeps_with_its_last_figures(client, outputs):
    text = client.get("/runs").text
    assert re.findall(r'name="run" value="([^"]+)"', text) in (["first", "sweep/0"], ["sweep/0", "first"])
    assert "4 of 4" in text
    assert "8 of 8" in text
    assert "0.125 " in text, "loss of sweep/0's last step"


def test_last_row_of_metrics_is_that_of_the_whole_table(outputs):
    path = outputs / "sweep/0/metrics.csv"
    assert last_metrics(path) == read_metrics(path)[-1]
    with path.open("a") as file:
        file.write("9,0.5,0.")  # a row that is being written
    assert last_metrics(path)["step"] == "8"


def test_images_are_the_parts_of_the_strips(client, outputs, tmp_path):
    strip = read_strip(outputs / "first/samples/step-000004/one.png")
    for part, image in ((0, strip.controls[0]), (1, strip.result), (2, strip.target)):
        answer = client.get("/image", params={"run": "first", "sample": "4/one", "part": part})
        (tmp_path / "x.webp").write_bytes(answer.content)
        assert np.array_equal(np.asarray(Image.open(tmp_path / "x.webp")), np.asarray(image))


def test_compared_runs_have_a_line_each_and_the_settings_that_differ(client, outputs):
    write_run(outputs / "third", 4, "make it snow", optimizer={"lr": 0.1})
    text = client.get("/compare?run=first&run=sweep/0&run=third").text
    chart = json.loads(re.search(r"data-chart='(.*?)'", text)[1])
    assert [line["label"] for line in chart["lines"]] == ["first", "sweep/0", "third"]
    assert (chart["lines"][1]["x"][-1], chart["lines"][1]["y"][-1]) == (8, 0.125)
    rows = re.findall(
        r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text.partition("Settings that differ")[2]
    )
    assert rows == [("optimizer.lr", "0.1", "0.2", "0.1"), ("trainer.max_steps", "4", "8", "4")]
    assert "choose 2 to 6 runs" in client.get("/compare?run=first").text


def test_state_follows_the_files_of_a_run(outputs):
    run = Shelf(outputs).get("first")
    assert state_of(run) == "failed", "it has saved nothing"
    run.checkpoint.parent.mkdir()
    run.checkpoint.touch()
    assert state_of(run) == "stopped"
    (run.path / ".lock").write_text(f" another-host {os.getpid()} {time.time()}")
    assert state_of(run) == "running", "on another machine, which has just written its lock"
    old = time.time() - 1000
    for path in (run.path / ".lock", run.metrics):
        os.utime(path, (old, old))
    assert state_of(run) == "stopped"
    run.finished.write_text("{}")
    assert state_of(run) == "finished"


def test_a_damaged_config_is_shown_and_hides_no_other_run(client, outputs):
    (outputs / "first/config.yaml").write_text("a: [")
    text = client.get("/runs").text
    assert "config.yaml is damaged" in text
    assert "sweep/0" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", ""),
        ("config.yaml", "trainer: null"),
        ("config.yaml", "trainer: {max_steps: '${a.b'}"),
        ("metrics.csv", "step,loss_avg\n1,x\n"),
        ("metrics.csv", "\0\xff"),
        ("validation.csv", "step,val_loss\n1,x\n"),
        ("validation.csv", "step\n1\n"),
        ("samples/step-000004/one.png", ""),
        ("samples/step-000004/other.png", "<script>"),
        ("note.txt", "\0\xff"),
        (".lock", " nowhere 1e999 x"),
        ("finished.json", "{"),
    ],
)
def test_a_damaged_file_is_named_and_hides_no_other_run(client, outputs, name, content):
    (outputs / "first" / name).write_bytes(content.encode("latin-1"))
    client = TestClient(client.app, BASE, raise_server_exceptions=False, cookies=client.cookies)
    text = client.get("/runs").text
    assert re.findall(r'name="run" value="([^"]+)"', text) in (["first", "sweep/0"], ["sweep/0", "first"])
    for address in ("/run?run=first", "/compare?run=first&run=sweep/0"):
        answer = client.get(address)
        found = re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
        assert answer.status_code == 200 or name in found[1] or "first" in found[1]
        assert answer.headers["content-security-policy"]


def test_a_row_that_is_being_written_is_left_out(client, outputs):
    for name in ("metrics.csv", "validation.csv"):
        with (outputs / "first" / name).open("a") as file:
            file.write("step,val_loss,psnr\n4,0.5,20\n5,0." if name == "validation.csv" else "5,0.")
    answer = client.get("/run?run=first")
    assert answer.status_code == 200
    assert '"x": [4], "y": [0.5]' in answer.text, "the row before"


def test_a_problem_is_shown_below_the_form_which_stays(client, outputs):
    """Else a part that asks for itself again would be empty for good."""
    answer = client.get("/run?run=gone", headers={"hx-request": "true"})
    assert answer.text.startswith("<p")
    assert (answer.status_code, answer.headers["hx-retarget"], answer.headers["hx-reselect"]) == (404, "#message", "p")
    assert "hx-retarget" not in client.get("/run?run=first").headers


def test_while_a_step_is_sampled_the_other_samples_show_their_step_before(client, outputs):
    strip = read_strip(outputs / "first/samples/step-000004/one.png")
    strip.write(outputs / "first/samples/step-000008/two.png")
    text = client.get("/run?run=first").text
    shown = re.findall(r'src="/image\?run=first&amp;sample=(\d)%2F(\w+)&amp;part=1"', text)
    assert shown == [("0", "one"), ("4", "one"), ("0", "one"), ("8", "two")]
    assert "None" not in text.partition("<h2>Curves")[0]


ASKED = {"hx-request": "true"}


def listed(client, address):
    return re.findall(r'href="/run\?run=([^"]+)"', client.get(address).text)


def say(client, address, **form):
    """Send a form as the page does; return the status and the text or the address that follows."""
    answer = client.post(address, data=form, headers=ASKED)
    return answer.status_code, answer.headers.get("hx-redirect", answer.text)


def run_elsewhere(run):
    """Make a run one of another machine, which has just started it."""
    (run.path / ".lock").write_text(f" another-host {os.getpid()} {time.time()}")


def test_runs_are_found_by_name_model_note_and_state_and_sorted_by_any_column(client, outputs):
    say(client, "/note", run="first", note="blue <sky>")
    say(client, "/note", run="first", star="★ ")
    assert Shelf(outputs).found("FIRST") == Shelf(outputs).found("blue embedded") == ["first"]
    assert listed(client, "/runs?search=failed") == listed(client, "/runs?search=embedded")
    assert listed(client, "/runs?search=★") == ["first"]
    assert listed(client, "/runs?sort=duration") == ["first", "sweep/0"]
    assert listed(client, "/runs?sort=-step") == ["sweep/0", "first"]
    text = client.get("/runs?search=sky&sort=-date").text
    assert 'hx-get="/runs?search=sky&amp;sort=-date' in text, "its refreshes find the same"
    assert "blue &lt;sky&gt;" in text
    assert "No run matches" in client.get("/runs?search=nowhere").text


def test_only_several_runs_are_compared(client):
    assert "Choose two runs." in client.get("/runs").text
    assert "<button>compare" not in client.get("/runs?search=first").text


def test_runs_of_the_queue_are_listed(client, outputs):
    (outputs / ".queue").mkdir()
    with Jobs(outputs, lambda: None).changing() as waiting:
        waiting["outputs/<next>"] = ["output_dir=outputs/<next>", "data.root=https://me:secret@host/x"]
    text = client.get("/runs?search=queued").text
    assert "outputs/&lt;next&gt;" in text
    assert "secret" not in text
    assert "outputs/&lt;next&gt;" not in client.get("/runs?search=first").text
    say(client, "/queue", run="outputs/<next>", change="remove")
    assert ">queued<" not in client.get("/runs").text


def test_time_left_follows_the_pace_of_training_and_not_the_pause_before_a_resumption():
    steps = [{"step": str(step), "seconds": str(10 * step)} for step in range(1, 61)]  # a step takes ten seconds
    assert time_left(steps, 100, time.time())["left"] == "0:06:40"
    assert time_left(steps, 100, time.time() - 100)["left"] == "0:05:00", "the last row is 100 seconds old"
    assert time_left(steps[:1], 100, time.time()) is None
    assert time_left(steps, "a hundred", time.time()) is None


def test_a_running_run_shows_its_progress_and_before_its_first_step_what_it_does(client, outputs):
    run = write_run(outputs / "slow", 4, "x")
    run.log.write_text("loading transformer\n\u2570\u2500\u256f\n")
    run_elsewhere(run)
    os.utime(run.metrics, (0, 0))
    text = client.get("/run?run=slow").text
    assert ("<p>loading transformer</p>" in text, "<progress" in text) == (True, False)
    os.utime(run.metrics)
    assert '<progress value="4" max="4"' in client.get("/run?run=slow").text


def test_advice_of_the_terminal_is_given_in_the_page(client, outputs):
    for name, strength in (("first", 0.02), ("sweep/0", 0.9)):
        table = f"step,val_loss,psnr,psnr_nothing,strength\n0,1,12,13,0\n4,0.5,20,13,{strength}\n"
        (outputs / name / "validation.csv").write_text(table)
    assert "the edit is too weak, strength 0.02 of 1" in client.get("/run?run=first").text
    assert 'class="mark"' not in client.get("/run?run=sweep/0").text


def test_a_run_is_renamed_within_its_folder_unless_it_is_in_use(client, outputs):
    for name in ("", " ", "..", "../x", "a/b", ".hidden", "a\\b", "x\ny", "sweep"):
        assert say(client, "/rename", run="first", name=name)[0] == 400
    assert say(client, "/rename", run="sweep/0", name="rain") == (200, "/run?run=sweep%2Frain")
    run_elsewhere(run := Shelf(outputs).get("first"))
    assert "is in use" in say(client, "/rename", run="first", name="snow")[1]
    assert "is in use" in say(client, "/delete", run="first", sure="yes")[1]
    assert run.config.is_file()


@pytest.mark.parametrize("inner", ["inner", "a/b/c/inner", ".hidden", "export", "a/export", "samples/step-000004"])
def test_a_run_around_a_running_one_is_neither_renamed_nor_deleted(client, outputs, inner):
    run = write_run(outputs / "first" / inner / "run", 4, "x")
    run_elsewhere(run)
    for address, form in (("/rename", {"name": "snow"}), ("/delete", {}), ("/delete", {"sure": "yes"})):
        status, text = say(client, address, run="first", **form)
        assert (status, f"{run} is in use" in text) == (400, True)
    assert run.config.is_file()
    (run.path / ".lock").unlink()
    assert say(client, "/delete", run="first", sure="yes") == (200, "/runs")


def test_delete_asks_first_and_follows_no_link(client, outputs, tmp_path):
    elsewhere = write_run(tmp_path / "elsewhere/0", 4, "x")
    (outputs / "linked").symlink_to(elsewhere.path)
    (outputs / "others").symlink_to(tmp_path / "elsewhere")
    (outputs / "first/samples/linked").symlink_to(elsewhere.path)
    text = say(client, "/delete", run="first")[1]
    assert re.search(r"This frees [\d.,]+ (bytes|kB), \d+ files", text)
    assert (outputs / "first").is_dir()
    assert say(client, "/delete", run="first", sure="yes") == (200, "/runs")
    assert say(client, "/delete", run="linked", sure="yes") == (200, "/runs")
    assert say(client, "/delete", run="others/0", sure="yes")[0] == 400
    assert say(client, "/rename", run="others/0", name="x")[0] == 400
    assert sorted(path.name for path in outputs.iterdir()) == ["others", "sweep"]
    assert elsewhere.config.is_file()


def test_lora_is_saved_under_the_name_of_the_run_and_a_link_is_not_sent(client, outputs, tmp_path):
    for name in ("first/lora/last", "sweep/0/lora/best"):
        (outputs / name).mkdir(parents=True)
        (outputs / name / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    (outputs / "first/lora/best").symlink_to(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    answer = client.get("/lora?run=first&which=last")
    assert (answer.content, answer.headers["content-disposition"]) == (
        b"weights",
        'attachment; filename="first.safetensors"',
    )
    assert "sweep_0_best.safetensors" in client.get("/lora?run=sweep/0&which=best").headers["content-disposition"]
    assert client.get("/lora?run=first&which=best").status_code == 404
    assert client.get("/run?run=first").text.count('href="/lora?') == 1


NAMES = ["${oc.env:HIDDEN}", r"\${oc.env:HIDDEN}", "${run_folder:last}", "~x", "a,b", 'it\'s "q"', "[a]{b}", "'a'"]
NAMES += ["a=b", " a b", "\u96ea", "null", "--help", "$x #(c)", "@x*", "a\\"]


def read_back(words, script):
    """Return settings of a command by their keys, as Hydra reads them."""
    given = OverridesParser.create().parse_overrides(read_arguments([*words, "--cfg", "job"], script)[:-2])
    return {one.key_or_group: OmegaConf.create({"value": one.value()}).value for one in given}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_page_names_the_folder_of_its_run(client, outputs, monkeypatch, name):
    monkeypatch.setenv("HIDDEN", "seen")
    started = []
    monkeypatch.setattr(
        Jobs, "start", lambda self, words, run, script="train": started.append((words, str(run), script))
    )
    run = write_run(outputs / name, 4, "x")
    write_config(run.config, {"model_name": "embedded"})
    for file in (run.checkpoint, run.path / "lora/last/pytorch_lora_weights.safetensors"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert say(client, "/export", run=name)[0] == say(client, "/resume", run=name)[0] == 200
    assert f"{shlex.quote(str(run))} ckpt_path=last" in html.unescape(client.get("/run", params={"run": name}).text)
    for when in ("now", "next"):
        assert say(client, "/start", output_dir=f"{outputs / name}", when=when, **{"data.root": "x"})[0] == 200
    assert say(client, "/plan", **{"data.root": "x"})[0] in (200, 400), "its log is not written here"
    (jobs := Jobs(outputs, lambda: None)).start_next()
    assert not jobs.waiting()
    assert [folder for _, folder, _ in started[:3]] == [f"{run}/export", f"{run}", f"{run}-2"]
    assert len(started) == 5
    for words, folder, script in started:
        found = read_back([one for one in words if one != "ckpt_path=last"], script)
        assert found["output_dir"] == folder
        assert found.get("lora") in (None, str(run))


@pytest.mark.parametrize("name", NAMES[:2] + NAMES[3:6])
def test_a_run_of_any_name_is_exported(run, gallery, copied, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HIDDEN", "seen")
    folder = copied(gallery("plain"), f"outputs/{name}")
    words = []
    monkeypatch.setattr(Jobs, "start", lambda self, arguments, run, script: words.extend(arguments))
    with TestClient(create_app("the token", outputs=folder.parent), BASE) as client:
        client.get("/", params={"token": "the token"})
        say(client, "/export", run=name)
    text = run("predict", *words).text
    assert "seen" not in text
    assert list((folder / "export").glob("*.safetensors"))
    assert not [
        path for path in tmp_path.rglob("*") if "seen" in f"{path}" or (path.is_file() and b"seen" in path.read_bytes())
    ]


def test_a_run_is_not_trained_in_a_folder_that_settings_would_resolve(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HIDDEN", "seen")
    monkeypatch.chdir(tmp_path)
    for name in ("${oc.env:HIDDEN}", "a/${seed}"):
        line = run("train", f"output_dir={name}", ok=False).error
        assert line == f"error: output_dir={name}: a run's folder cannot have ${{ in its name. Rename it."
    assert "~nosuch" in run("train", "data.root=~nosuch/x", "output_dir=x", ok=False).error
    assert {path.name for path in tmp_path.iterdir()} <= {"x", "outputs"}


def test_the_export_of_a_tlora_asks_for_a_rank_and_proposes_the_mean_of_its_schedule(client, outputs, monkeypatch):
    started = []
    monkeypatch.setattr(Jobs, "start", lambda self, arguments, run, script: started.append((arguments, script)))
    assert "has no LoRA yet" in say(client, "/export", run="first")[1]
    schedule = {"rank_schedule": "timestep", "min_rank": 1, "alpha_rank_scale": 1.0}
    tlora = {"adapter": {**schedule, "rank": "${model.recipe.rank}"}, "model": {"recipe": {"rank": 8}}}
    late = {"adapter": {**schedule, "rank_schedule": "step_index", "rank": 16, "alpha_rank_scale": 3}}
    harm = {"adapter": {**schedule, "rank": {"_target_": "os.getcwd"}}}
    constant = {"adapter": {**schedule, "rank_schedule": "constant", "rank": 8}}
    runs = {"first": {}, "third": tlora, "late": late, "harm": harm, "constant": constant}
    for name, settings in runs.items():
        run = Shelf(outputs).get(name) if name == "first" else write_run(outputs / name, 4, "x", **settings)
        (run.path / "lora/last").mkdir(parents=True)
        (run.path / "lora/last/pytorch_lora_weights.safetensors").touch()
    for name, mean in (("third", 4), ("late", 4)):
        assert f'name="rank" inputmode="numeric" value="{mean}"' in client.get(f"/run?run={name}").text
        for rank in ("", "0", "-1", "x", "1.5", "\u0663", "8]", "1" * 5000, "${seed}"):
            status, text = say(client, "/export", run=name, rank=rank)
            assert (status, f"such as {mean}, the mean of its schedule" in text) == (400, True)
    assert not started
    for name in ("first", "harm", "constant"):  # predict.py refuses a T-LoRA of unknown settings
        assert 'name="rank"' not in client.get(f"/run?run={name}").text
        say(client, "/export", run=name, rank="5")
    say(client, "/export", run="third", rank=" 5 ")
    rest = ["format=comfyui", "overwrite=true"]
    assert started == [
        (["task=export", f"lora={outputs / name}", *rest, *rank, f"output_dir={outputs / name}/export"], "predict")
        for name, rank in (("first", []), ("harm", []), ("constant", []), ("third", ["rank=5"]))
    ]


@pytest.mark.parametrize(("most", "least", "alpha"), [(16, 1, 1.0), (8, 0, 0.5), (64, 4, 3.0), (1, 0, 10.0)])
def test_the_proposed_rank_is_the_mean_of_the_schedule(most, least, alpha):
    ranks = RankSchedule("timestep", most, least, alpha).active_ranks(torch.arange(1000, 0, -1))
    assert mean_of_schedule(most, least, alpha) == max(1, round(ranks.double().mean().item()))
