"""Builds of a cache: killed, told to stop, by two processes, of bad images."""

import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest

from datamodules.shards.tar import scan
from foundation.locks import one_at_a_time
from tests.datamodules.images.test_transforms import unreadable
from tests.support.caches import cache_overrides, encoded, only
from tests.support.commands import kill_when, wait_until
from tests.support.hold import hold_build
from tests.support.latents import content
from tests.support.pictures import make_pairs, photograph
from tests.support.several_runs import as_rank


def test_build_killed_9_resumes_and_encodes_no_finished_sample_again(run, start, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 6)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    command = cache_overrides(tiny, root, tmp_path / "killed")
    process = start("predict", *command, before=partial(hold_build, 8, tmp_path / "held", 30_000))
    kill_when((tmp_path / "held").exists, process)
    (folder,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
    done = sum("key" in row for tar in folder.glob("*.tar") for row in scan(tar)[0])
    assert len(list(folder.glob("*.tar"))) > 1
    assert 0 < done <= 8

    assert done + encoded(run("predict", *command)) == 12
    killed, whole = only(tmp_path / "killed"), only(tmp_path / "whole")
    assert content(killed) == content(whole)


@pytest.mark.slow
def test_build_that_is_stopped_says_so_and_resumes(run, start, tiny, tmp_path):
    """The whole process group is told, data workers included."""
    root = make_pairs(tmp_path / "pairs", [(64, 64)] * 12)
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.num_workers=1"]
    process = start("predict", *command, before=partial(hold_build, 5, tmp_path / "held"))
    wait_until((tmp_path / "held").exists, process)
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM; the same command continues" in text
    assert "Traceback" not in text
    assert encoded(run("predict", *command)) == 7


def as_rank_and_hold(rank, port, samples, marker):
    as_rank(rank, port)
    hold_build(samples, marker, 80_000)


@pytest.mark.slow
def test_killed_build_of_two_processes_resumes_with_any_number_and_encodes_nothing_twice(run, start, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 6)
    command = cache_overrides(tiny, root, tmp_path / "cache")

    def two(samples=-1):
        """Start two processes as torchrun does, which wait when each has encoded some samples."""
        markers = [tmp_path / f"rank-{rank}" for rank in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        before = [partial(as_rank_and_hold, rank, port, samples, marker) for rank, marker in enumerate(markers)]
        processes = [start("predict", *command, before=one) for one in before]
        if samples > 0:
            for process, marker in zip(processes, markers, strict=True):
                wait_until(marker.exists, process)
            return processes
        return [process.communicate(timeout=120)[0] for process in processes]

    for process in two(3):
        kill_when(lambda: True, process)
    process = start("predict", *command, before=partial(hold_build, 2, tmp_path / "alone", 80_000))
    kill_when((tmp_path / "alone").exists, process)
    assert "encoded 4 samples" in two()[0]
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    cache = only(tmp_path / "cache")
    assert content(cache) == content(only(tmp_path / "whole"))

    (root / "training_images" / "02.txt").write_text("another caption")
    assert "encoded 1 sample;" in two()[0], "one process has nothing to do"
    tars = set(cache.manifest()["shards"])
    left = {".used", "files-0.jsonl", "files-1.jsonl", "manifest.json", "preview.png", *tars}
    assert {path.name for path in cache.folder.iterdir()} == left | {name.replace(".tar", ".jsonl") for name in tars}


def test_mistakes_elsewhere_are_found_before_anything_is_encoded(refuses, tmp_path):
    refuses("adapter.target_modules=[to_kk]", f"data.cache_dir={tmp_path / 'cache'}", words="to_kk matches no")
    assert not list((tmp_path / "cache").glob("*/*.tar"))


def test_bad_images_stop_the_build_or_are_left_out(run, tiny, tmp_path):
    """Text by the name of an image, a pipe and a dangling link."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    (root / "control_images" / "01.png").write_text("no picture")
    for number, kind in enumerate(("pipe", "dangling"), 2):
        (root / "control_images" / f"0{number}.png").unlink()
        unreadable(root / "control_images" / f"0{number}.png", kind)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    error = run("predict", *command, ok=False).error
    assert "01.png" in error
    assert "3 unusable: cannot read the image" in error
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 1


def test_image_that_changes_while_it_is_encoded_is_refused(run, tiny, pairs, tmp_path, monkeypatch):
    """Otherwise new pixels would be stored under the old ones' name for ever."""
    from datamodules import encoding

    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    load = encoding.PairDataset.__getitem__

    def change_first(self, item):
        if item[0] == 1:
            photograph("camera", 32, 32).save(root / "control_images" / "01.png")
        return load(self, item)

    monkeypatch.setattr(encoding.PairDataset, "__getitem__", change_first)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "changed while it was encoded. Start again." in run("predict", *command, ok=False).error
    monkeypatch.undo()
    assert encoded(run("predict", *command)) == 2


def test_second_build_of_a_cache_waits_for_the_first(run, start, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 6)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    one = start("predict", *command, before=partial(hold_build, 3, tmp_path / "held"))
    wait_until((tmp_path / "held").exists, one)
    second = start("predict", *command)
    wait_until(lambda: "another command is filling" in Path(second.stdout.name).read_text(), second)
    (tmp_path / "held.go").touch()
    texts = [process.communicate(timeout=120)[0] for process in (one, second)]
    assert [one.returncode, second.returncode] == [0, 0], texts
    assert ["encoded 6 samples" in text for text in texts] == [True, False], texts
    assert len(only(tmp_path / "cache").sample_ids()) == 6


@pytest.mark.slow
def test_a_build_waits_for_a_process_that_a_killed_one_has_left(run, start, tiny, tmp_path):
    """Such a process may still write to its tar, though the first process and its lock are gone."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    run("predict", *command)
    make_pairs(root, [(32, 32)] * 4)
    cache = only(tmp_path / "cache")
    with one_at_a_time(cache.folder, shared=True):
        second = start("predict", *command)
        wait_until(lambda: "waiting for another process" in Path(second.stdout.name).read_text(), second)
        assert len(cache.sample_ids()) == 3
    text, _ = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert len(cache.sample_ids()) == 4
