"""Bases in all formats, in two processes: whole in each (DDP), and split over them (FSDP2)."""

import csv
import json
import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import safetensors.torch
import torch

from callbacks.report.figures import read_rows
from tests.lightning_modules.quantization.test_quantized_linear import WAYS
from tests.support.commands import ROOT, lora_bytes, short
from tests.support.quantized import MODEL, quantized
from tests.support.several_runs import as_rank
from tests.support.tiny_pipelines import MODELS

DDP = ["trainer.devices=2", "trainer.strategy=ddp"]
FSDP = ["trainer=fsdp", "trainer.devices=2"]
SETTINGS = ["scheduler=constant", "data.caption_dropout_rate=0", "model.dtype=float32"]
SPLIT = {
    "bf16": ["model.quantization=null", "model.dtype=bfloat16"],
    "fp8": ["model.dtype=bfloat16"],
    "int8": ["model.quantization.format=int8"],
}


def arguments_of(runs):
    return json.dumps([[str(part) for part in overrides] for overrides in runs])


@pytest.fixture
def in_two_processes(start):
    """The status and the text of two processes such as torchrun starts."""

    def in_two_processes(runs):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        script = "tests.support.several_runs"
        ranks = [start(script, arguments_of(runs), before=partial(as_rank, rank, port)) for rank in range(2)]
        texts = [rank.communicate(timeout=300)[0] for rank in ranks]
        return max(rank.returncode for rank in ranks), "".join(texts)

    return in_two_processes


def by_torchrun(runs):
    """The text of both processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOGLEVEL": "ERROR"}
    done = subprocess.run(
        [*command, "-m", "tests.support.several_runs", arguments_of(runs)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    return done.stdout + done.stderr


def assert_close(one, other):
    """Of the LoRA files of two runs."""
    ours, theirs = (safetensors.torch.load(lora_bytes(folder)) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-6)


def column(run_folder, name):
    """Of metrics.csv."""
    return [row[name] for row in csv.DictReader((run_folder / "metrics.csv").open())]


def test_two_processes_on_each_format_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    """So are a float32 base, and an orthogonal T-LoRA, whose ranks follow each sample's timestep."""
    bases = {f"{format}-{backend}": (format, backend) for format, backend in WAYS}

    def overrides(kind, name, *more):
        return quantized(tiny, pairs, tmp_path / kind / name, 2, *bases[name], *SETTINGS, *more)

    def plain(kind, *more):
        return [*short(tiny, pairs, tmp_path / kind / "plain", 5), *more]

    def orthogonal(kind, *more):
        return [*short(tiny, pairs, tmp_path / kind / "ortho", 4), *SETTINGS, "adapter=ortho_tlora", *more]

    def full(kind, *more):
        common = [part for part in short(tiny, pairs, tmp_path / kind / "full", 2) if not part.startswith("adapter.")]
        return [*common, *SETTINGS, "adapter=full", "adapter.text_encoders=true", *more]

    for name in bases:
        run("train", *overrides("one", name, "data.batch_size=2"))
    run("train", *full("one", "data.batch_size=2"))
    run("train", *orthogonal("one", "data.batch_size=2"))
    run("train", *plain("one", "data.batch_size=2"))
    dump = "+callbacks.dump={_target_: tests.support.probes.DumpWeights, folder: " + str(tmp_path) + "}"
    others = [orthogonal("two", *DDP), plain("two", *DDP, dump), full("two", *DDP)]
    status, text = in_two_processes([*(overrides("two", name, *DDP) for name in bases), *others])
    assert status == 0, text
    for name in (*bases, "ortho", "plain"):
        assert_close(*(tmp_path / kind / name for kind in ("one", "two")))
    assert column(tmp_path / "one" / "ortho", "active_rank") == column(tmp_path / "two" / "ortho", "active_rank")
    one, two = (tmp_path / kind / "full/model/last" for kind in ("one", "two"))
    for path in two.glob("t*/*.safetensors"):
        theirs = safetensors.torch.load_file(one / path.relative_to(two))
        for name, weight in safetensors.torch.load_file(path).items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-5)
    losses = (column(tmp_path / kind / "plain", "loss") for kind in ("one", "two"))
    assert all(float(a) == pytest.approx(float(b), rel=1e-4) for a, b in zip(*losses, strict=True))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_split_base_trains_the_same_adapter_and_goes_on_bitwise(run, in_two_processes, tiny, pairs, tmp_path):
    """As DDP does in bf16, and one process with the doubled batch. Held-out samples are measured on the way."""

    def overrides(kind, name, steps, *more):
        output = tmp_path / kind / name
        common = short(tiny, pairs, output, steps, shown=True)
        return [*MODEL, *common, *SETTINGS, *SPLIT[name], "data.val_count=2", *more]

    quiet, measured = "callbacks.sample_images=null", "callbacks.sample_images.num_inference_steps=2"
    whole = [overrides("whole", name, 4, *DDP, measured) for name in SPLIT if "model.dtype=bfloat16" in SPLIT[name]]
    for name in SPLIT:
        if "model.dtype=bfloat16" not in SPLIT[name]:
            run("train", *overrides("whole", name, 4, "data.batch_size=2", quiet))
    status, text = in_two_processes(
        [
            *whole,
            *(overrides("split", name, 4, *FSDP, measured) for name in SPLIT),
            overrides("parts", "fp8", 2, *FSDP, quiet),
            overrides("parts", "fp8", 4, *FSDP, quiet, "ckpt_path=last"),
        ]
    )
    assert status == 0, text
    for name in SPLIT:
        assert_close(tmp_path / "whole" / name, tmp_path / "split" / name)
        assert len(list((tmp_path / "split" / name / "samples").glob("*/*.png"))) == 4
        assert lora_bytes(tmp_path / "split" / name, "best") == lora_bytes(tmp_path / "split" / name)
    losses = [read_rows(tmp_path / kind / "fp8" / "validation.csv") for kind in ("whole", "split")]
    assert [row["step"] for row in losses[0]] == [row["step"] for row in losses[1]] == [0, 4]
    assert losses[0][1]["val_loss"] == pytest.approx(losses[1][1]["val_loss"], rel=1e-2)
    assert lora_bytes(tmp_path / "parts" / "fp8") == lora_bytes(tmp_path / "split" / "fp8")


@pytest.fixture(scope="module")
def short_runs(repositories, datasets, tiny, pairs, tmp_path_factory):
    """A folder of three runs in two processes: every layer of Qwen by LoRA, all of it, and one that is told to stop."""
    folder = tmp_path_factory.mktemp("short_runs")
    model = "qwen_image_edit"
    qwen = [f"model={model}", *MODELS[model].settings, *SETTINGS, *DDP]
    runs = []
    for name in ("lora", "full"):
        common = short(repositories[model], datasets[model], folder / name, 3)
        common = [part for part in common if not part.startswith("adapter.")]
        every = ["adapter.target_modules=all-linear"] if name == "lora" else []
        runs.append([*qwen, *common, f"adapter={name}", *every])
    watch = f"+callbacks.watch={{_target_: tests.support.watch.WatchAndStop, folder: {folder}, stop_at: 3}}"
    stopped = short(tiny, pairs, folder / "stopped", 8)
    runs.append([*stopped, *SETTINGS, *DDP, "save_every=0", "trainer.log_every_n_steps=8", watch])
    text = by_torchrun(runs)
    return folder, text


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_what_qwens_last_block_leaves_out_is_not_waited_for(short_runs, adapter):
    folder, text = short_runs
    assert (folder / adapter / "metrics.csv").is_file(), text
    assert column(folder / adapter, "step") == ["1", "2", "3"], text


def test_processes_stop_at_the_same_step_and_wait_for_no_device_on_the_way(short_runs):
    """The second is told in step 3. Nor does it give up while the first is busy for longer than a step may take."""
    folder, text = short_runs
    ranks = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(rank.is_file() for rank in ranks), text
    left = [json.loads(rank.read_text()) for rank in ranks]
    assert [rank["last"] for rank in left] == [3, 3]
    assert [rank["found"]["3"] for rank in left] == [[], []]
    assert torch.load(folder / "stopped/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    assert "stopped by SIGTERM after step 3" in text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.quantization.format=nf4", "trainer=fsdp cannot split transformer_blocks.0.attn.to_q"),
        ("optimizer=adamw_8bit", "trainer=fsdp does not go with AdamW8bit, which needs whole weights"),
        ("optimizer=prodigy", "trainer=fsdp does not go with Prodigy"),
        ("model.offload.blocks=2", "model.offload.blocks does not go with trainer=fsdp"),
        (
            "model.offload.activations=true model.gradient_checkpointing=every_2",
            "model.offload.activations with trainer=fsdp needs model.gradient_checkpointing=full",
        ),
    ],
)
def test_what_cannot_be_split_is_one_line(run, tiny, pairs, tmp_path, setting, message):
    one = ["trainer=fsdp", "trainer.devices=1", *setting.split()]
    assert message in run("train", *MODEL, *short(tiny, pairs, tmp_path / "run", 1), *one, ok=False).error
