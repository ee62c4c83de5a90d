"""Bases in all formats, in two processes: whole in each (DDP), and split over them (FSDP2)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from report.tables import read_validation
from tests.support.commands import ROOT, lora_bytes, short
from tests.support.quantized import MODEL, NAMES, quantized
from tests.support.same_runs import assert_close, assert_close_losses, column
from tests.support.several_runs import DDP, FSDP, arguments_of

SETTINGS = ["scheduler=constant", "data.caption_dropout_rate=0", "model.dtype=float32"]
SPLIT = {
    "bf16": ["model.quantization=null", "model.dtype=bfloat16"],
    "fp8": ["model.dtype=bfloat16"],
    "int8": ["model.quantization.format=int8"],
}


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


@pytest.mark.slow
def test_two_processes_on_each_format_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    """So are a float32 base, and an orthogonal T-LoRA, whose ranks follow each sample's timestep."""

    def overrides(kind, name, *more):
        return quantized(tiny, pairs, tmp_path / kind / name, 2, name, *SETTINGS, *more)

    def plain(kind, *more):
        return [*short(tiny, pairs, tmp_path / kind / "plain", 5), *more]

    def orthogonal(kind, *more):
        return [*short(tiny, pairs, tmp_path / kind / "ortho", 4), *SETTINGS, "adapter=ortho_tlora", *more]

    for name in NAMES:
        run("train", *overrides("one", name, "data.batch_size=2"))
    run("train", *orthogonal("one", "data.batch_size=2"))
    run("train", *plain("one", "data.batch_size=2"))
    dump = "+callbacks.dump={_target_: tests.support.probes.DumpWeights, folder: " + str(tmp_path) + "}"
    others = [orthogonal("two", *DDP), plain("two", *DDP, dump)]
    status, text = in_two_processes([*(overrides("two", name, *DDP) for name in NAMES), *others])
    assert status == 0, text
    for name in (*NAMES, "ortho", "plain"):
        assert_close(*(tmp_path / kind / name for kind in ("one", "two")))
    assert column(tmp_path / "one" / "ortho", "active_rank") == column(tmp_path / "two" / "ortho", "active_rank")
    assert_close_losses(*(tmp_path / kind / "plain" for kind in ("one", "two")))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


@pytest.mark.slow
def test_split_base_trains_the_same_adapter_and_goes_on_bitwise(run, in_two_processes, tiny, pairs, tmp_path):
    """As DDP does in bf16, and one process with the doubled batch. Held-out samples are measured on the way."""

    def overrides(kind, name, steps, *more):
        output = tmp_path / kind / name
        common = short(tiny, pairs, output, steps, shown=True)
        return [*MODEL, *common, *SETTINGS, *SPLIT[name], "data.val_count=2", *more]

    quiet, measured = "callbacks.sample_images=null", "model.sampling.num_inference_steps=2"
    whole = [overrides("whole", name, 4, *DDP, measured) for name in SPLIT if "model.dtype=bfloat16" in SPLIT[name]]
    for name in SPLIT:
        if "model.dtype=bfloat16" not in SPLIT[name]:
            run("train", *overrides("whole", name, 4, "data.batch_size=2", quiet))
    status, text = in_two_processes(
        [
            *whole,
            *(overrides("split", name, 4, *FSDP, measured) for name in SPLIT),
            overrides("parts", "fp8", 2, *FSDP, quiet, measured),
            overrides("parts", "fp8", 4, *FSDP, quiet, measured, "ckpt_path=last"),
        ]
    )
    assert status == 0, text
    for name in SPLIT:
        assert_close(tmp_path / "whole" / name, tmp_path / "split" / name)
        assert len(list((tmp_path / "split" / name / "samples").glob("*/*.png"))) == 4
        assert lora_bytes(tmp_path / "split" / name, "best") == lora_bytes(tmp_path / "split" / name)
    losses = [read_validation(tmp_path / kind / "fp8" / "validation.csv") for kind in ("whole", "split")]
    assert [row["step"] for row in losses[0]] == [row["step"] for row in losses[1]] == [0, 4]
    assert losses[0][1]["val_loss"] == pytest.approx(losses[1][1]["val_loss"], rel=1e-2)
    assert lora_bytes(tmp_path / "parts" / "fp8") == lora_bytes(tmp_path / "split" / "fp8")


@pytest.mark.slow
def test_processes_stop_at_the_same_step_and_wait_for_no_device_on_the_way(tiny, pairs, tmp_path):
    """The second is told in step 3. Nor does it give up while the first is busy for longer than a step may take."""
    watch = f"+callbacks.watch={{_target_: tests.support.watch.WatchAndStop, folder: {tmp_path}, stop_at: 3}}"
    stopped = short(tiny, pairs, tmp_path / "stopped", 8)
    text = by_torchrun([[*stopped, *SETTINGS, *DDP, "save_every=0", "trainer.log_every_n_steps=8", watch]])
    ranks = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    assert all(rank.is_file() for rank in ranks), text
    left = [json.loads(rank.read_text()) for rank in ranks]
    assert [rank["last"] for rank in left] == [3, 3]
    assert [rank["found"]["3"] for rank in left] == [[], []]
    assert torch.load(tmp_path / "stopped/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    assert "stopped by SIGTERM after step 3" in text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.quantization.format=nf4", "trainer=fsdp cannot split transformer_blocks.0.attn.to_q"),
        ("optimizer=adamw_8bit", "trainer=fsdp: AdamW8bit needs whole weights"),
        ("model.offload.blocks=2", "model.offload.blocks: trainer=fsdp splits the blocks"),
    ],
)
def test_what_cannot_be_split_is_one_line(refuses, setting, words):
    base = ["model/quantization=fp8", "model.gradient_checkpointing=full"]
    refuses(*base, "trainer=fsdp", "trainer.devices=1", setting, words=words)
