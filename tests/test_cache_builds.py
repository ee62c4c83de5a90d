"""Builds of a cache: killed, told to stop, by two processes, of bad pictures."""

import os
import signal
from functools import partial

import pytest

from datamodules.shards.tar import scan
from tests.datamodules.images.test_transforms import unreadable
from tests.support.caches import cache_overrides, encoded, flip, only, short
from tests.support.commands import kill_when, wait_until
from tests.support.hold import divide_and_hold, divide_finely, hold_build
from tests.support.latents import content
from tests.support.pictures import make_pairs, photograph


@pytest.mark.slow
def test_build_killed_9_goes_on_and_encodes_no_finished_sample_again(run, start, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 15)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"), "data.shard_size=80000")
    command = [*cache_overrides(tiny, root, tmp_path / "killed"), "data.shard_size=80000"]
    process = start("predict", *command, before=partial(hold_build, 20, tmp_path / "held"))
    kill_when((tmp_path / "held").exists, process)
    (folder,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
    done = sum("key" in row for tar in folder.glob("*.tar") for row in scan(tar)[0])
    assert len(list(folder.glob("*.tar"))) > 1
    assert 0 < done <= 20

    assert done + encoded(run("predict", *command)) == 30
    killed, whole = only(tmp_path / "killed"), only(tmp_path / "whole")
    index = [sorted((cache.folder / "index.jsonl").read_text().splitlines()) for cache in (killed, whole)]
    assert index[0] == index[1]
    assert content(killed) == content(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_build_that_is_told_to_stop_says_so_and_goes_on(run, start, tiny, tmp_path, number):
    """The whole process group is told, data workers included."""
    root = make_pairs(tmp_path / "pairs", [(64, 64)] * 12)
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.num_workers=1"]
    process = start("predict", *command, before=partial(hold_build, 5, tmp_path / "held"))
    wait_until((tmp_path / "held").exists, process)
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert f"stopped by {number.name}; the same command continues" in text
    assert "Traceback" not in text
    assert encoded(run("predict", *command)) == 7


@pytest.mark.slow
def test_two_processes_build_the_cache_that_one_builds(run, start, tiny, mixed, tmp_path):
    run("predict", *cache_overrides(tiny, mixed, tmp_path / "one"))
    two = [*cache_overrides(tiny, mixed, tmp_path / "two"), "trainer.devices=2", "trainer.strategy=ddp"]
    process = start("predict", *two, before=partial(divide_finely, 2))
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "encoded 8 samples" in text
    assert content(only(tmp_path / "one")) == content(only(tmp_path / "two"))
    shards = only(tmp_path / "two").manifest()["shards"]
    names = [f"latents-{unit:05d}-000000.tar" for unit in range(4)]
    assert {name: facts["samples"] for name, facts in shards.items()} == dict.fromkeys(names, 2)
    assert {path.name for path in only(tmp_path / "two").folder.iterdir()} >= {"index.jsonl", "manifest.json"}
    assert [path.name for path in (only(tmp_path / "two").folder / "building").glob("*/*")] == ["closed"]


def test_the_work_of_a_killed_builder_is_taken_up_by_one_that_runs(run, start, tiny, tmp_path):
    """At once on this machine; what it had encoded stays. Another takes its place, and helps."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 15)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    command = cache_overrides(tiny, root, tmp_path / "cache")
    held = {name: tmp_path / name for name in ("killed", "other")}

    def begin(name, samples):
        return start("predict", *command, before=partial(divide_and_hold, 4, samples, tmp_path / name))

    killed = begin("killed", 7)
    wait_until(held["killed"].exists, killed)
    other = begin("other", 1)
    wait_until(held["other"].exists, other)
    kill_when(lambda: True, killed)
    (tmp_path / "other.go").touch()
    third = begin("third", -1)
    texts = [process.communicate(timeout=120)[0] for process in (other, third)]
    assert [other.returncode, third.returncode] == [0, 0], texts
    assert content(only(tmp_path / "cache")) == content(only(tmp_path / "whole"))
    encodings = sum(path.stat().st_size for path in tmp_path.glob("*.encoded"))
    assert encodings == 30, "none twice"


def test_damaged_shard_is_named_and_only_its_samples_are_encoded_again(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 12)
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.shard_size=60000"]
    run("predict", *command)
    cache = only(tmp_path / "cache")
    before = content(cache)
    name, facts = next(iter(cache.manifest()["shards"].items()))
    path = cache.folder / name
    path.write_bytes(path.read_bytes()[:-9000])
    outcome = run("predict", *command)
    assert f"{name} is damaged or missing: the lost ones of its {facts['samples']} samples are" in outcome.text
    assert 0 < encoded(outcome) <= facts["samples"] < 12
    assert content(only(tmp_path / "cache")) == before


def test_mistakes_elsewhere_are_found_before_anything_is_encoded(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2), "adapter.target_modules=[to_kk]", ok=False)
    assert not list((tmp_path / "cache").glob("*/*.tar"))


def test_bad_image_stops_the_build_or_is_left_out(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    (root / "control_images" / "01.png").write_text("no picture")
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "01.png" in run("predict", *command, ok=False).error
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 2
    text = run("train", *short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip").text
    assert "2 pairs of" in text
    assert "skipped 1 unusable" in text
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 0


def test_picture_that_changes_while_it_is_encoded_is_refused(run, tiny, pairs, tmp_path, monkeypatch):
    """Else new pixels would go by the name of the old ones, for ever."""
    from datamodules import encoding

    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    load = encoding.PairDataset.__getitem__

    def change_first(self, item):
        if item[0] == 1:
            photograph("camera", 32, 32).save(root / "control_images" / "01.png")
        return load(self, item)

    monkeypatch.setattr(encoding.PairDataset, "__getitem__", change_first)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "changed while it was encoded: start again" in run("predict", *command, ok=False).error
    monkeypatch.undo()
    assert encoded(run("predict", *command)) == 2


def test_no_usable_pair(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)])
    (root / "control_images" / "00.png").write_text("no picture")
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.on_bad_image=skip"]
    assert "no usable pair is left" in run("predict", *command, ok=False).error
    arguments = [*short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip"]
    assert "no usable pair is left" in run("train", *arguments, ok=False).error


def test_what_is_no_file_stops_the_build_or_is_left_out(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    for number, kind in enumerate(("pipe", "dangling")):
        (root / "control_images" / f"0{number}.png").unlink()
        unreadable(root / "control_images" / f"0{number}.png", kind)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "2 unusable: cannot read the image" in run("predict", *command, ok=False).error
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 2
    text = run("train", *short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip").text
    assert "skipped 2 unusable" in text


def test_builds_of_one_cache_wait_for_each_other(run, start, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 12)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    processes = [start("predict", *command) for _ in range(2)]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert sorted("encoded 12 samples" in text for text in texts) == [False, True]
    assert len(only(tmp_path / "cache").sample_ids()) == 12


@pytest.mark.parametrize("damaged", ["rows", "tar", "plan"])
def test_what_is_damaged_while_a_build_is_interrupted_is_found(run, start, tiny, tmp_path, damaged):
    """By the next command: rows of a tar are read from it again, and samples that are lost are encoded again."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 6)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    command = cache_overrides(tiny, root, tmp_path / "cache")
    process = start("predict", *command, before=partial(divide_and_hold, 2, 3, tmp_path / "held"))
    kill_when((tmp_path / "held").exists, process)
    [rows] = tmp_path.glob("cache/*/latents-00000-*.jsonl")
    path = {"rows": rows, "tar": rows.with_suffix(".tar"), "plan": rows.parent / "building" / "000000" / "plan.json"}[
        damaged
    ]
    flip(path, 0 if damaged == "plan" else 0.5)
    run("predict", *command)
    assert content(only(tmp_path / "cache")) == content(only(tmp_path / "whole"))


@pytest.mark.parametrize("damaged", ["tar", "plan"])
def test_what_is_damaged_while_a_build_runs_is_said(run, start, tiny, tmp_path, damaged):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 6)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    command = cache_overrides(tiny, root, tmp_path / "cache")
    process = start("predict", *command, before=partial(divide_and_hold, 2, 3, tmp_path / "held"))
    wait_until((tmp_path / "held").exists, process)
    name = {"tar": "latents-00000-*.tar", "plan": "building/*/plan.json"}[damaged]
    [path] = tmp_path.glob(f"cache/*/{name}")
    flip(path, 0 if damaged == "plan" else 0.5)
    if damaged == "plan":
        text, _ = start("predict", *command).communicate(timeout=60)
        assert "plan.json is damaged: start again" in text
    (tmp_path / "held.go").touch()
    text, _ = process.communicate(timeout=60)
    assert process.returncode == (1 if damaged == "tar" else 0), text
    assert ("samples are lost: start again" in text) == (damaged == "tar")
    run("predict", *command)
    assert content(only(tmp_path / "cache")) == content(only(tmp_path / "whole"))


def test_a_build_that_was_killed_encodes_what_has_changed_since(run, start, tiny, tmp_path):
    """In a piece of the work that was done, too."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 6)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    process = start("predict", *command, before=partial(divide_and_hold, 2, 3, tmp_path / "held"))
    kill_when((tmp_path / "held").exists, process)
    (root / "training_images" / "00.txt").write_text("another caption")
    assert encoded(run("predict", *command)) == 4
    run("train", *short(tiny, root, tmp_path / "run", 1))
