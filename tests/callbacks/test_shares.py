"""Processes share sample images and validation, and what comes of it is the same."""

import json
import re
import signal

import pytest
from PIL import Image

from tests.support.commands import lora_bytes, short
from tests.support.pictures import make_pairs
from tests.support.several_runs import DDP, start_two

PICTURES = ["model.sampling.num_inference_steps=2", "callbacks.sample_images.count=3", "sample_every=2"]
PICTURES += ["scheduler=constant", "model.dtype=float32", "save_every=2"]
IN_ORDER = "+callbacks.validation.metrics.in_order._target_=tests.support.probes.InOrder"
# More samples than processes, and not evenly; fewer; and those that train.
HELD_OUT = {"three": "data.val_count=3", "one": "data.val_count=1", "none": "data.val_count=0"}


@pytest.fixture
def overrides(tiny, pairs, tmp_path):
    def overrides(name, *more, steps=4):
        return [*short(tiny, pairs, tmp_path / name, steps, shown=True), *PICTURES, *more]

    return overrides


def shown(folder):
    """Return all images and metrics of held-out samples by file name."""
    files = [*folder.glob("samples/*/*.png"), *folder.glob("validation.csv"), *folder.glob("grid.png")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_images_and_figures_of_two_processes_equal_those_of_one_and_training_is_unchanged(
    run, in_two_processes, overrides, trained, tmp_path
):
    """The weights stay constant; otherwise the order of a sum would differ between one and two processes."""
    still = [f"adapter.init_from={trained / 'lora/last'}", "adapter.alpha=8", "optimizer.lr=1e-30", IN_ORDER]
    for name, held_out in HELD_OUT.items():
        run("train", *overrides(f"alone-{name}", held_out, *still))
    count = "+callbacks.count={_target_: tests.support.probes.CountShares, folder: ${output_dir}}"
    shared = [overrides(f"shared-{name}", held_out, *still, *DDP, count) for name, held_out in HELD_OUT.items()]
    learning = ["optimizer.lr=1e-2", "data.val_count=3", *DDP]
    quiet = ["callbacks.sample_images=null", "callbacks.report=null"]
    status, text = in_two_processes([*shared, overrides("seen", *learning), overrides("unseen", *learning, *quiet)])
    assert status == 0, text
    for name, pictures, losses in (("three", (2, 1), (2, 1)), ("one", (1, 0), (1, 0)), ("none", (2, 1), (0, 0))):
        made = [json.loads((tmp_path / f"shared-{name}/rank{rank}").read_text()) for rank in range(2)]
        # In three steps; losses in four bands.
        assert [one["pictures"] for one in made] == [3 * count for count in pictures]
        assert [one["losses"] for one in made] == [12 * count for count in losses]
        alone, shared = (shown(tmp_path / f"{kind}-{name}") for kind in ("alone", "shared"))
        assert len([file for file in shared if file.startswith("samples")]) == 3 * sum(pictures)
        assert ("validation.csv" in shared) == (name != "none")
        assert alone == shared
    assert lora_bytes(tmp_path / "shared-three", "best") == lora_bytes(tmp_path / "shared-three", "step-000002")
    assert lora_bytes(tmp_path / "seen") == lora_bytes(tmp_path / "unseen")


@pytest.mark.slow
def test_each_note_appears_once_for_two_processes_and_in_each_job_of_a_sweep(run, in_two_processes, tiny, tmp_path):
    """Both processes read each image and cut the same caption; each alone knows something else."""
    root = make_pairs(tmp_path / "pairs", [(64, 48)] * 4)
    for path in (root / "training_images").glob("*.txt"):
        path.write_text("mirror it, " * 800)
    for path in (root / "training_images").glob("*.png"):
        Image.open(path).save(path, icc_profile=b"junk" * 40)
    probe = "+callbacks.note._target_=tests.support.probes.Note"
    settings = [*short(tiny, root, tmp_path / "run", 1, data="pairs"), probe]
    expected = [" tokens are cut to ", "colour profile cannot be used", "note: of every process"]

    status, text = in_two_processes([[*settings, *DDP, "data.batch_size=1"]])
    assert status == 0, text
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)), text
    assert all(any(words in note for note in notes) for words in (*expected, "of process 0", "of process 1"))
    kept = (tmp_path / "run/log.txt").read_text()
    assert all(kept.count(words) for words in (*expected, "of process 0")), "whichever process has shown it"

    sweep = [*settings, f"output_dir={tmp_path / 'sweep'}", "optimizer.lr=1e-4,1e-3"]
    _, *jobs = re.split(r"^job \d: ", run("train", "-m", *sweep).text, flags=re.M)
    notes = [sorted(re.findall("^note: .*", job, re.M)) for job in jobs]
    assert all(any(words in note for note in notes[0]) for words in expected)
    assert notes[0] == notes[1]
    assert len(notes[0]) == len(set(notes[0]))


@pytest.mark.slow
def test_signal_to_one_process_in_the_middle_of_its_images_stops_both_between_two(start, overrides, tmp_path):
    """The weights are saved, and the resumed run samples and measures that step again."""
    stop = "+callbacks.stop={_target_: tests.support.probes.StopWhileSampling, step: 2}"
    processes = start_two(start, [overrides("run", "data.val_count=3", stop, *DDP, steps=8)])
    text = "".join(process.communicate(timeout=120)[0] for process in processes)
    # torchrun would take 0 for the end of its work.
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, text
    assert "stopped by SIGTERM after step 2" in text
    assert list((tmp_path / "run/samples/step-000002").glob("*.png")) == []
    assert [line[0] for line in (tmp_path / "run/validation.csv").read_text().splitlines()[1:]] == ["0"]
    assert lora_bytes(tmp_path / "run") == lora_bytes(tmp_path / "run", "step-000002")
