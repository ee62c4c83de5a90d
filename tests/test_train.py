"""The promises of a training run, by its real command line."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

import train
from tests.conftest import compose, lora_bytes, make_pairs, short, start, wait_until


def weights(run):
    return safetensors.torch.load(lora_bytes(run))


def metrics(run):
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def assert_same_weights(first, second, **tolerance):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key], **tolerance)


def test_resumed_run_is_bitwise_the_uninterrupted_one_after_kill_9(run, tiny, tmp_path):
    """In the middle of an epoch, in mixed sizes, with accumulation, caption dropout and two data workers."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32), (32, 32), (48, 32), (32, 48)])
    settings = ["trainer.accumulate_grad_batches=2", "data.batch_size=2", "data.num_workers=2", "save_every=4"]
    settings += ["data.caption_dropout_rate=0.3", "scheduler.num_warmup_steps=2"]
    run("train", *short(tiny, root, tmp_path / "whole", 8), *settings)

    killed = [*short(tiny, root, tmp_path / "killed", 8), *settings]
    process = start("train", *killed)
    wait_until((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Whatever the killed run reached after step 4 was never finished.
    assert not (tmp_path / "killed" / "lora" / "step-000008").exists()
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "killed", "step-000004")
    run("train", *killed, "ckpt_path=last")

    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "whole")
    assert lora_bytes(tmp_path / "whole", "step-000004") == lora_bytes(tmp_path / "killed", "step-000004")
    assert lora_bytes(tmp_path / "whole", "step-000004") != lora_bytes(tmp_path / "whole")
    steps, losses = ([row[key] for row in metrics(tmp_path / "killed")] for key in ("step", "loss"))
    assert steps == [str(n) for n in range(1, 9)]
    assert losses == [row["loss"] for row in metrics(tmp_path / "whole")]


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "prodigy", "adafactor", "adamw_schedule_free"])
def test_resume_is_bitwise_for_other_optimizers(run, tiny, pairs, tmp_path, optimizer):
    settings = [f"optimizer={optimizer}", "scheduler=constant"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 6), *settings, "save_every=0")
    run("train", *short(tiny, pairs, tmp_path / "halves", 3), *settings, "save_every=2")
    run("train", *short(tiny, pairs, tmp_path / "halves", 6), *settings, "ckpt_path=last", "save_every=2")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")


def test_files_of_a_schedule_free_run_hold_its_average(run, tiny, pairs, tmp_path):
    """x of arXiv 2405.15682, where training goes on with y = (1 - beta) z + beta x."""
    run("train", *short(tiny, pairs, tmp_path / "run", 6), "optimizer=adamw_schedule_free", "optimizer.lr=1e-2")
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"].values()
    average = safetensors.torch.load(lora_bytes(tmp_path / "run"))
    for (name, y), moments in zip(checkpoint["state_dict"].items(), state, strict=True):
        x = (y - (1 - 0.9) * moments["z"]) / 0.9
        torch.testing.assert_close(average[name.replace(".default", "")], x, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(x, y, atol=1e-4)


def test_prodigy_and_schedule_free_bring_a_constant_schedule():
    for name in ("prodigy", "adamw_schedule_free"):
        assert compose("train", f"optimizer={name}").scheduler._target_.endswith("get_constant_schedule_with_warmup")
    chosen = compose("train", "optimizer=prodigy", "scheduler=cosine")
    assert "cosine" in chosen.scheduler._target_


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_the_run_goes_on_exactly(run, tiny, pairs, tmp_path, number):
    """To the whole process group, data workers included, as a terminal and a cluster send it; within a window."""
    settings = ["trainer.accumulate_grad_batches=3", "save_every=0", "scheduler=constant", "data.num_workers=2"]
    folder = tmp_path / "a stopped run"
    stopped = [*short(tiny, pairs, folder, 400), *settings]
    process = start("train", *stopped)
    wait_until((folder / "metrics.csv").exists, process)
    while len((folder / "metrics.csv").read_text().splitlines()) < 4:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert "Traceback" not in text
    assert f"stopped by {number.name} after step" in text
    [line] = [line for line in text.splitlines() if "go on with the same command and" in line]
    goes_on = shlex.split(line.partition("same command and ")[2])
    assert goes_on == [f"output_dir={folder}", "ckpt_path=last"]
    step = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"]
    assert (folder / "lora" / f"step-{step:06d}").is_dir()

    run("train", *stopped, *goes_on, f"trainer.max_steps={step + 3}")
    run("train", *short(tiny, pairs, tmp_path / "whole", step + 3), *settings)
    assert lora_bytes(folder) == lora_bytes(tmp_path / "whole")


def test_run_that_was_killed_behind_its_last_saving_gets_its_end(run, tiny, pairs, tmp_path):
    """Its last pictures, what they measure, and its report; so does one that was killed so in the middle."""
    folder = tmp_path / "run"

    def arguments(steps):
        common = [one for one in short(tiny, pairs, folder, steps) if "sample_images" not in one]
        settings = ["callbacks.sample_images.num_inference_steps=1", "callbacks.sample_images.count=2"]
        return [*common, *settings, "data.val_count=2", "save_every=2", "sample_every=2", "scheduler=constant"]

    run("train", *arguments(4))
    pictures = sorted((folder / "samples" / "step-000004").glob("*.png"))
    before = {path: path.read_bytes() for path in (folder / "validation.csv", folder / "grid.png", *pictures)}
    assert len(pictures) == 2
    weights_before = lora_bytes(folder)

    def kill_behind_last_saving():
        rows = (folder / "validation.csv").read_text().splitlines()
        (folder / "validation.csv").write_text("\n".join(rows[:-1]) + "\n")
        shutil.rmtree(folder / "samples" / "step-000004")
        (folder / "grid.png").unlink()
        (folder / "report.html").unlink()

    for measured_only in (False, True):
        kill_behind_last_saving()
        if measured_only:
            (folder / "samples" / "step-000004").mkdir()
            for path in pictures:
                path.write_bytes(before[path])
        outcome = run("train", *arguments(4), "ckpt_path=last")
        assert "nothing to do" in outcome.text
        assert {path: path.read_bytes() for path in before} == before
        assert "http-equiv" not in (folder / "report.html").read_text(), "a finished report waits for nothing"
        assert lora_bytes(folder) == weights_before
    kill_behind_last_saving()
    run("train", *arguments(6), "ckpt_path=last")
    steps = [line.split(",")[0] for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    assert steps == ["0", "2", "4", "6"]


def test_run_that_saved_nothing_is_started_anew(run, tiny, pairs, tmp_path, monkeypatch):
    """It was ended at once, by a second signal, before its first saving."""
    monkeypatch.setattr("callbacks.signals.ECHO", 0.0)
    folder = tmp_path / "run"
    arguments = [*short(tiny, pairs, folder, 400), "save_every=0", "trainer.log_every_n_steps=1"]
    with told(lambda: (folder / "metrics.csv").exists() and "2," in (folder / "metrics.csv").read_text()):
        outcome = run("train", *arguments, ok=False)
    assert outcome.status == 128 + signal.SIGINT
    assert "stopped by SIGINT; nothing to save" in outcome.text
    assert "Traceback" not in outcome.text
    assert (folder / "config.yaml").is_file()

    error = run("train", *arguments, "ckpt_path=last", ok=False).error
    assert "there is no checkpoint" in error
    assert "leave ckpt_path out to start it anew" in error
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert "it is started anew" in run("train", *arguments, "trainer.max_steps=2").text
    assert [row["step"] for row in metrics(folder)] == ["1", "2"]
    assert not (folder / "samples").exists()
    assert (folder / "notes.txt").exists()


@contextmanager
def told(when):
    """Tell this process twice to stop, as soon as something has happened."""
    over = threading.Event()

    def tell():
        while not over.is_set() and not when():
            time.sleep(0.002)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_accumulating_two_equals_batch_of_two(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "batch", 6), "data.batch_size=2")
    run("train", *short(tiny, pairs, tmp_path / "window", 6), "trainer.accumulate_grad_batches=2")
    assert_same_weights(tmp_path / "batch", tmp_path / "window", rtol=0, atol=1e-5)
    for one, other in zip(metrics(tmp_path / "batch"), metrics(tmp_path / "window"), strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-4)


def test_loss_falls(run, tiny, pairs, tmp_path):
    """200 steps on 8 fixed pairs, measured at noise that training never saw."""
    from hydra.utils import instantiate

    from datamodules.images.dataset import collate

    settings = ["adapter.rank=16", "adapter.target_modules=all-linear", "optimizer.lr=3e-3", "data.batch_size=4"]
    settings.append("data.caption_dropout_rate=0")
    overrides = [*short(tiny, pairs, tmp_path / "run", 200, "pairs"), *settings]
    run("train", *overrides)
    losses = []
    for more in ([], [f"adapter.init_from={tmp_path / 'run'}"]):
        cfg = compose("train", *overrides, *more)
        module, data = instantiate(cfg.model), instantiate(cfg.data)
        module.configure_model()
        data.scan()
        batch = module.encode(collate(data.pixels(8)))
        total = 0.0
        for i in range(8):
            batch.draws = list(range(10**6 + 8 * i, 10**6 + 8 * i + 8))
            with torch.no_grad():
                total += float(module.losses(batch).mean()) / 8
        losses.append(total)
    print("mean loss before and after:", losses)
    assert losses[1] < 0.9 * losses[0]


def test_max_steps_and_schedule_count_optimizer_steps(run, tiny, pairs, tmp_path):
    """The existing system ran past max_train_steps, and its schedule went wrong under accumulation."""
    settings = ["trainer.accumulate_grad_batches=3", "scheduler=linear", "scheduler.num_warmup_steps=2"]
    run("train", *short(tiny, pairs, tmp_path / "run", 6), *settings, "optimizer.lr=8e-4")
    rates = [float(row["lr"]) for row in metrics(tmp_path / "run")]
    assert rates == pytest.approx([0, 4e-4, 8e-4, 6e-4, 4e-4, 2e-4], rel=1e-5)


def test_run_folder_holds_what_is_promised(run, tiny, pairs, tmp_path):
    folder = tmp_path / "run"
    arguments = [a for a in short(tiny, pairs, folder, 4) if "logger" not in a and "sample_images" not in a]
    settings = ["save_every=2", "sample_every=2", "callbacks.sample_images.num_inference_steps=2"]
    outcome = run("train", *arguments, *settings)
    for name in ("step-000002", "step-000004", "last"):
        assert (folder / "lora" / name / "pytorch_lora_weights.safetensors").is_file()
    assert len(list((folder / "samples").glob("step-00000[24]/*.png"))) == 8
    assert list((folder / "tensorboard").glob("events.out.*"))
    assert (folder / "checkpoints" / "last.ckpt").stat().st_size < 500_000, "a checkpoint holds what trains, only"
    for word in ("Retouch", "rank 4", "8 pairs", "8 of 32x32", str(folder), "python predict.py lora="):
        assert word in outcome.text
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.max_steps == 4
    run("train", "-cp", str(folder), "-cn", "config", f"output_dir={tmp_path / 'again'}")
    assert lora_bytes(tmp_path / "again") == lora_bytes(folder), "a run can be repeated from its config.yaml"


def test_overrides_of_a_repeated_run_count(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2))
    again = [f"output_dir={tmp_path / 'again'}", "adapter.rank=2", "optimizer.lr=0.5", "trainer.max_steps=3"]
    run("train", "-cp", tmp_path / "run", "-cn", "config", *again)
    assert weights(tmp_path / "again")["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"].shape[0] == 2
    rates = [float(row["lr"]) for row in metrics(tmp_path / "again")]
    assert rates == pytest.approx([0.5, 0.375, 0.125], rel=1e-4)


def test_a_run_goes_on_with_its_own_settings(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "run", 2)
    run("train", *arguments)
    error = run("train", *arguments, "ckpt_path=last", "optimizer.lr=1e-2", ok=False).error
    assert "optimizer.lr was 0.0001 in" in error
    assert "adapter.init_from=" in error
    assert "nothing to do" in run("train", *arguments, "ckpt_path=last").text
    text = run("train", *arguments, "ckpt_path=last", "trainer.max_steps=3", "data.batch_size=2").text
    assert "note: data.batch_size was 1 in" in text


def test_what_was_learned_is_kept_when_a_run_fails(run, tiny, pairs, tmp_path):
    """Between two savings, and although the failing picture was fine when the run started."""
    arguments = [*short(tiny, pairs, tmp_path / "run", 9), "save_every=0"]
    settings = ["optimizer.lr=1e20", "scheduler=constant", "model.max_nonfinite_steps=2", "trainer.log_every_n_steps=3"]
    run("train", *arguments, *settings, ok=False)
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3
    assert (tmp_path / "run" / "lora" / "step-000003").is_dir()


def test_samples_in_the_middle_of_a_window_change_nothing(run, tiny, pairs, tmp_path):
    settings = ["trainer.accumulate_grad_batches=2"]
    plain = short(tiny, pairs, tmp_path / "plain", 4)
    run("train", *plain, *settings)
    sampled = [a for a in short(tiny, pairs, tmp_path / "sampled", 4) if "sample_images" not in a]
    run("train", *sampled, *settings, "sample_every=1", "callbacks.sample_images.num_inference_steps=1")
    assert lora_bytes(tmp_path / "plain") == lora_bytes(tmp_path / "sampled")


def test_loss_that_is_not_finite_is_not_applied_and_stops_after_some(run, tiny, pairs, tmp_path):
    """A first step of absurd size; from then on nothing is finite, and nothing is applied."""
    settings = ["save_every=1", "optimizer.lr=1e20", "scheduler=constant", "model.max_nonfinite_steps=3"]
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 9), *settings, ok=False)
    assert outcome.error.startswith("error: 3 steps in a row were not finite, the last in sample 0")
    for step in (2, 3, 4):
        assert re.search(rf"step {step} is not applied: not finite in sample \d\d\n", outcome.text)
    first = lora_bytes(tmp_path / "run", "step-000001")
    for step in (2, 3):
        later = safetensors.torch.load(lora_bytes(tmp_path / "run", f"step-00000{step}"))
        assert all(torch.equal(later[k], v) for k, v in safetensors.torch.load(first).items())


def test_starting_from_existing_weights_goes_on_from_their_loss(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "first", 3), "adapter.alpha=8", "optimizer.lr=1e-2")
    more = [f"adapter.init_from={tmp_path / 'first'}", "optimizer.lr=0", "optimizer.weight_decay=0"]
    run("train", *short(tiny, pairs, tmp_path / "same", 1), *more, "adapter.alpha=8")
    assert_same_weights(tmp_path / "first", tmp_path / "same", rtol=0, atol=0)
    # Another alpha: the weights are rescaled so that the update stays the same.
    run("train", *short(tiny, pairs, tmp_path / "other", 1), *more, "adapter.alpha=2")
    first, other = weights(tmp_path / "first"), weights(tmp_path / "other")
    for key in [key for key in first if "lora_B" in key]:
        update, again = (file[key] @ file[key.replace("lora_B", "lora_A")] for file in (first, other))
        torch.testing.assert_close(update * 8, again * 2)


def test_help_explains_itself_quickly(run):
    text = run("train", "--help").text
    for word in ("adapter.rank", "ckpt_path=last", "optimizer: adafactor, adamw, adamw_8bit", "Examples", "embedded"):
        assert word in text
    assert "lora_scale" in run("predict", "--help").text
    assert "  root: null" in run("train", "--cfg", "job").text


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], "experiment=shapes"),
        (["-m"], "experiment=shapes"),
        (["-m", "optimizer.lr=1e-3,2e-3"], "experiment=shapes"),
        (["optimizer.lr=1e-3,2e-3", "-m"], "experiment=shapes"),
        (["adapter=tlora", "--info", "searchpath"], "experiment=shapes"),
        (["--cfg", "job"], "experiment=embedded"),  # shows what own data would get
        (["adapter=tlora", "--cfg", "job"], "experiment=embedded"),
        (["-c", "job", "adapter=tlora"], "experiment=embedded"),
        (["-c", "job", "model=flux_kontext"], None),
        (["model=embedded", "adapter=tlora"], "experiment=shapes"),
        (["optimizer=prodigy"], "data=shapes"),  # which finds a learning rate of its own
        (["adapter=full"], "data=shapes"),
        (["data.root=pairs"], "experiment=embedded"),
        (["data.root=pairs", "model=embedded"], "experiment=embedded"),
        (["data.root=pairs", "optimizer=prodigy"], None),
        (["data.root=pairs", "--cfg", "job"], "experiment=embedded"),
        (["data.root=pairs", "model=flux_kontext"], None),
        (["model=flux_kontext"], None),
        (["experiment=quick"], None),
        (["data.shards=s3://bucket/folder"], "experiment=embedded"),
        (["-cp", "outputs/RUN", "-cn", "config"], None),
    ],
)
def test_settings_of_the_embedded_model_are_for_those_who_name_none(arguments, added):
    before, after = (get_args_parser().parse_args(one) for one in (arguments, train.with_examples(arguments)))
    assert set(after.overrides) == {*before.overrides, *([added] if added else [])}
    assert after.multirun == before.multirun


def test_model_without_data_is_one_line(run, tiny, tmp_path):
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model=flux_kontext", f"output_dir={tmp_path / 'run'}"]
    outcome = run("train", *settings, ok=False)
    assert outcome.error == "error: nothing to learn from: give data.root=FOLDER, or data=shapes for drawn examples"
    assert "loading" not in outcome.text


def test_sweep_leaves_a_table_and_curves(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "sweep", 3)
    run("train", "-m", *arguments, "optimizer.lr=1e-4,1e-3", "callbacks.metrics.window=2")
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["overrides"] for row in rows] == ["optimizer.lr=0.0001", "optimizer.lr=0.001"]
    for number, row in enumerate(rows):
        assert (tmp_path / "sweep" / str(number) / "lora" / "last").samefile(row["lora"])
        assert float(row["final_loss"]) == float(metrics(tmp_path / "sweep" / str(number))[-1]["loss_avg"])
        assert float(row["seconds"]) > 0
        means = [float(line["loss_avg"]) for line in metrics(tmp_path / "sweep" / str(number))]
        assert float(row["best_loss"]) == min(means[1:])
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 5000


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


def test_newest_run_goes_on_without_naming_it(run, tiny, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in short(tiny, pairs, tmp_path, 2) if "output_dir" not in a]
    run("train", *arguments)
    (folder,) = (tmp_path / "outputs").iterdir()
    monkeypatch.setattr(time, "strftime", lambda *_: folder.name)  # of the same second
    run("train", *arguments, "ckpt_path=last", "trainer.max_steps=3")
    assert list((tmp_path / "outputs").iterdir()) == [folder]
    assert [row["step"] for row in metrics(folder)] == ["1", "2", "3"]
    run("train", "-m", *arguments, "trainer.max_steps=1,2")
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {folder.name, f"{folder.name}-2"}
    assert {path.name for path in (tmp_path / "outputs" / f"{folder.name}-2").iterdir()} >= {"0", "1", "sweep.csv"}


def test_lora_header_tells_what_the_weights_are(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 1), "adapter.alpha=3")
    with safetensors.safe_open(tmp_path / "run/lora/last/pytorch_lora_weights.safetensors", "pt") as file:
        header = json.loads(file.metadata()["retouch"])
    assert header["adapter"] == {"rank": 4, "alpha": 3, "target_modules": ["to_k", "to_q", "to_v", "to_out.0"]}
    assert header["base"] == str(tiny)
    assert header["base_precision"] == "float32"
    assert header["step"] == 1
    assert header["model"]["name"] == "embedded"
