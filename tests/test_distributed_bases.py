"""Bases in all formats, in two processes: whole in each (DDP), and split over them (FSDP2)."""

import pytest

from report.tables import read_validation
from tests.support.commands import lora_bytes, short
from tests.support.quantized import MODEL, quantized
from tests.support.same_runs import SMOOTH_ADAM, assert_close, column
from tests.support.several_runs import DDP, FSDP

# Where a sum of other order rounds an input to the next int8, a small gradient changes by more than rounding.
SETTINGS = ["scheduler=constant", "data.caption_dropout_rate=0", "model.dtype=float32", SMOOTH_ADAM]


@pytest.mark.slow
def test_two_processes_on_each_format_are_one_with_the_doubled_batch(run, in_two_processes, tiny, pairs, tmp_path):
    """This includes an orthogonal T-LoRA, whose ranks follow each sample's timestep."""

    def overrides(kind, name, *more):
        if name == "ortho":
            common = [*short(tiny, pairs, tmp_path / kind / name, 3), "adapter=ortho_tlora"]
        else:
            common = quantized(tiny, pairs, tmp_path / kind / name, 2, name)
        return [*common, *SETTINGS, *more]

    names = "fp8", "nf4", "int8_w8a8", "ortho"
    for name in names:
        run("train", *overrides("one", name, "data.batch_size=2"))
    status, text = in_two_processes([overrides("two", name, *DDP) for name in names])
    assert status == 0, text
    for name in names:
        assert_close(*(tmp_path / kind / name for kind in ("one", "two")))
    assert column(tmp_path / "one" / "ortho", "active_rank") == column(tmp_path / "two" / "ortho", "active_rank")


@pytest.mark.slow
def test_split_base_trains_the_same_adapter_and_resumes_bitwise(run, in_two_processes, tiny, pairs, tmp_path):
    """fp8 as DDP does, with held-out samples measured on the way; int8 as one process with the doubled batch."""

    def overrides(kind, format, steps, *more):
        return [*quantized(tiny, pairs, tmp_path / kind / format, steps, format), *SETTINGS, *more]

    def fp8(kind, steps, *more):
        common = short(tiny, pairs, tmp_path / kind / "fp8", steps, shown=True)
        return [*MODEL, *common, *SETTINGS, "model.dtype=bfloat16", "data.val_count=2", "callbacks.report=null", *more]

    run("train", *overrides("whole", "int8_w8a8", 3, "data.batch_size=2"))
    status, text = in_two_processes(
        [
            fp8("whole", 3, *DDP),
            fp8("split", 3, *FSDP),
            fp8("parts", 2, *FSDP),
            fp8("parts", 3, *FSDP, "ckpt_path=last"),
            overrides("split", "int8_w8a8", 3, *FSDP),
        ]
    )
    assert status == 0, text
    for name in ("fp8", "int8_w8a8"):
        assert_close(tmp_path / "whole" / name, tmp_path / "split" / name)
    assert len(list((tmp_path / "split/fp8/samples").glob("*/*.png"))) == 4
    assert lora_bytes(tmp_path / "split/fp8", "best") == lora_bytes(tmp_path / "split/fp8")
    losses = [read_validation(tmp_path / kind / "fp8" / "validation.csv") for kind in ("whole", "split")]
    assert [row["step"] for row in losses[0]] == [row["step"] for row in losses[1]] == [0, 3]
    assert losses[0][1]["val_loss"] == pytest.approx(losses[1][1]["val_loss"], rel=1e-2)
    assert lora_bytes(tmp_path / "parts/fp8") == lora_bytes(tmp_path / "split/fp8")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.quantization.format=nf4", "trainer=fsdp cannot split transformer_blocks.0.attn.to_q"),
        ("optimizer=adamw_8bit", "trainer=fsdp: AdamW8bit needs whole weights"),
        ("model.offload.blocks=2", "model.offload.blocks: trainer=fsdp splits the blocks"),
    ],
)
def test_unsplittable_settings_are_one_line(refuses, setting, words):
    base = ["model/quantization=fp8", "model.gradient_checkpointing=full"]
    refuses(*base, "trainer=fsdp", "trainer.devices=1", setting, words=words)
