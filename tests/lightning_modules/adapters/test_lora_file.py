"""LoRA files that are damaged, hostile or of another kind: one short line, by the command line."""

import json
import struct

import pytest
import safetensors.torch
import torch

from datamodules.errors import UserError
from lightning_modules.lora_files.names import NO_NATIVE_NAMES, LayerNames
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.combinations import first
from tests.support.commands import short

LAYER = "transformer.transformer_blocks.0.attn.to_q"
GOOD = {f"{LAYER}.lora_A.weight": torch.ones(2, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 2)}
DOWN, UP = GOOD


def raw(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file by hand."""
    return struct.pack("<Q", len(header)) + header + data


def stored(state, metadata=None) -> bytes:
    return safetensors.torch.save({key: one.clone() for key, one in state.items()}, metadata)


def with_header(settings: str) -> bytes:
    return stored(GOOD, {"lora_adapter_metadata": settings})


OUTSIDE = json.dumps({DOWN: {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 10**12]}}).encode()
FILES = {
    "empty": (b"", "is an empty file"),
    "no safetensors": (b"\x80\x04pickle" * 10, "is a pickle of PyTorch"),
    "a GGUF file": (b"GGUF\x03" + bytes(60), "is a GGUF file; name a LoRA's safetensors file"),
    "truncated": (stored(GOOD)[:-40], "is damaged"),
    "an offset outside": (raw(OUTSIDE, b"\0" * 64), "is damaged"),
    "a header longer than the file": (struct.pack("<Q", 2**62) + b"{}", "is damaged"),
    "a header of 100 MB": (raw(b'{"__metadata__":{"a":"' + b"x" * 10**8 + b'"}}'), "its header has 100,000,025 bytes"),
    "not a number": (stored(GOOD | {UP: torch.full((64, 2), torch.nan)}), "lora_B.weight): training diverged"),
    "an alpha that is no number": (
        stored(GOOD | {f"{LAYER}.alpha": torch.tensor(torch.nan)}),
        "alpha): training",
    ),
    "two alphas": (stored(GOOD | {f"{LAYER}.alpha": torch.ones(2)}), "is damaged"),
    "NaN in diffusers' header": (with_header('{"transformer.lora_alpha": NaN}'), "is not finite"),
    "text in diffusers' header": (with_header('{"transformer.lora_alpha": "x"}'), "is damaged"),
    "a list as diffusers' header": (with_header("[]"), "is damaged"),
    "a pattern that is none": (
        with_header('{"transformer.lora_alpha": 1, "transformer.alpha_pattern": {"(": 1}}'),
        "alpha_pattern: ",
    ),
    "a header nested too deeply": (with_header("[" * 100_000), "is damaged"),
    "our header nested too deeply": (stored(GOOD, {"retouch": "[" * 100_000}), "is damaged"),
    "an alpha of text in our header": (stored(GOOD, {"retouch": '{"adapter": {"alpha": "x", "rank": 1}}'}), None),
    "a precision that is no settings": (
        stored(GOOD, {"retouch": '{"model": {"name": "flux_kontext", "quantization": "fp8"}}'}),
        "header retouch is not one of ours",
    ),
    "an export that is no facts": (
        stored(GOOD, {"retouch": '{"export": "x"}'}),
        "header retouch is not one of ours",
    ),
    "a schedule that is none": (
        stored(GOOD, {"retouch": '{"adapter": {"rank_schedule": "x"}}'}),
        "header retouch is not one of ours",
    ),
    "rank 0": (stored({DOWN: torch.ones(0, 64), UP: torch.ones(64, 0)}), "is damaged"),
    "ranks that differ": (stored(GOOD | {UP: torch.ones(64, 3)}), "has matrices of (2, 64) and (64, 3)"),
    "a convolution": (stored({DOWN: torch.ones(2, 64, 1, 1), UP: torch.ones(64, 2, 1, 1)}), "has matrices of"),
    "one half": (stored({DOWN: GOOD[DOWN]}), "half of an update"),
    "no tensors": (stored({}), "contains no layer of a transformer"),
    "text encoders alone": (
        stored({"lora_te1_x.lora_down.weight": torch.ones(2, 4), "lora_te1_x.lora_up.weight": torch.ones(4, 2)}),
        "only weights of text encoders",
    ),
    "a whole model": (
        stored({"transformer_blocks.0.attn.to_q.weight": torch.ones(4, 4)}),
        "contains a model's own weights (transformer_b",
    ),
    "LoKr": (
        stored({"lycoris_x.lokr_w1": torch.ones(2, 2), "lycoris_x.alpha": torch.ones(1)}),
        "only alpha and lokr_w1, half",
    ),
    "LoHa": (stored({"lora_unet_x.hada_w1_a": torch.ones(2, 2)}), "only hada_w1_a, half"),
    "biases": (stored(GOOD | {f"{LAYER}.lora_B.bias": torch.ones(64)}), "includes a LoRA with biases ("),
    "differences": (stored(GOOD | {"diffusion_model.x.diff": torch.ones(4)}), "includes whole differences of weights"),
    "something beside": (stored(GOOD | {"something": torch.ones(4)}), "contains more than a LoRA (something)"),
    "two adapters": (
        stored({key.replace(".weight", f".{name}.weight"): one for key, one in GOOD.items() for name in "ab"}),
        "contains several adapters",
    ),
    "long names": (
        stored({"x" * 50_000 + end: torch.ones(4, 4) for end in ("a", "b", "c")}),
        "it has names that no layer has",
    ),
    "long names of layers": (
        stored({"y" * 400 + f".lora_{half}.weight": torch.ones(4, 4) for half in "AB"}),
        "yyy... is not in the model",
    ),
    "many names": (
        stored({f"{'y' * 400}{number}.lora_{half}.weight": torch.ones(4, 4) for half in "AB" for number in range(99)}),
        "is not in the model and 96 more",
    ),
    "names that would write on the terminal": (
        stored({"a\x1b[2Jb": torch.ones(4, 4)}),
        "it has names that no layer has",
    ),
    "another model's": (
        stored({f"lora_unet_input_blocks_4_1.lora_{half}.weight": torch.ones(4, 4) for half in ("down", "up")}),
        "lora_unet_input_blocks_4_1 is not in the model; looked for diffusers' layer names and for native ones",
    ),
    "DoRA by columns": (
        stored(GOOD | {DOWN: torch.ones(2, 32), f"{LAYER}.dora_scale": torch.ones(1, 32)}),
        "is of a form that Retouch does not read: transformer.",
    ),
    "DoRA of a LoKr": (
        stored(
            {
                f"{LAYER}.lokr_w1": torch.ones(8, 8),
                f"{LAYER}.lokr_w2": torch.ones(8, 8),
                f"{LAYER}.dora_scale": torch.ones(64, 1),
            }
        ),
        "has the magnitude of a DoRA next to lokr_w1 and lokr_w2",
    ),
    "PiSSA": (
        with_header('{"transformer.init_lora_weights": "pissa_niter_4"}'),
        "saved by peft with init_lora_weights=pissa",
    ),
    "QALoRA": (with_header('{"transformer.use_qalora": true}'), "saved by peft with use_qalora=True"),
    "a setting of tomorrow": (with_header('{"transformer.use_next": true}'), "saved by peft with use_next=True"),
}


@pytest.mark.parametrize("name", FILES)
def test_one_short_line_says_what_is_wrong(run, tiny, photo, tmp_path, name):
    content, message = FILES[name]
    (tmp_path / "x.safetensors").write_bytes(content)
    request = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", "model.dtype=float32"]
    request += ["model.max_sequence_length=16", "num_inference_steps=1", f"output_dir={tmp_path / 'out'}", "prompt=x"]
    outcome = run("predict", f"lora={tmp_path / 'x.safetensors'}", f"image={photo}", *request, ok=message is None)
    if message is not None:
        assert message in outcome.error
        assert len(outcome.error) < 700
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["no safetensors", "not a number", "LoKr", "another model's", "rank 0"])
def test_the_same_for_weights_to_start_from(run, tiny, pairs, tmp_path, name):
    content, message = FILES[name]
    (tmp_path / "x.safetensors").write_bytes(content)
    more = [f"adapter.init_from={tmp_path / 'x.safetensors'}", "adapter.rank=2", "adapter.target_modules=[to_q]"]
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 1), *more, ok=False)
    assert message in outcome.error


@pytest.mark.parametrize(
    ("form", "halves"), first(1, [("lora_unet_", "down/up"), ("", "AB"), ("base_model.model.", "AB")])
)
def test_training_starts_from_files_of_others(run, tiny, pairs, tmp_path, form, halves):
    """Names differ, not layers; alpha is taken into account."""
    run("train", *short(tiny, pairs, tmp_path / "first", 2), "adapter.alpha=8", "optimizer.lr=1e-2")
    file = tmp_path / "first/lora/last/pytorch_lora_weights.safetensors"
    state, names = {}, dict(zip("AB", ("down", "up"), strict=True)) if halves == "down/up" else {"A": "A", "B": "B"}
    for key, one in safetensors.torch.load_file(file).items():
        layer, _, half = key.removeprefix("transformer.").removesuffix(".weight").rpartition(".lora_")
        layer = form + (layer.replace(".", "_") if form.endswith("_") else layer)
        state[f"{layer}.lora_{names[half]}.weight"] = one / 2 if half == "B" else one
        state[f"{layer}.alpha"] = torch.tensor(2.0 * one.shape[0 if half == "A" else 1])
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    more = [f"adapter.init_from={tmp_path / 'x.safetensors'}", "optimizer.lr=0", "optimizer.weight_decay=0"]
    run("train", *short(tiny, pairs, tmp_path / "second", 1), *more, "adapter.alpha=8")
    again = safetensors.torch.load_file(tmp_path / "second/lora/last/pytorch_lora_weights.safetensors")
    for key, one in safetensors.torch.load_file(file).items():
        torch.testing.assert_close(again[key], one)


def test_a_header_is_looked_at_without_reading_weights(stock, tmp_path):
    """The end of a file that is cut off is not there to be read."""
    (tmp_path / "x.safetensors").write_bytes(stored(GOOD))
    names = LayerNames(stock.transformer, NO_NATIVE_NAMES)
    file = LoRAFile(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(stored(GOOD)[:-40])
    assert list(file.match(names, "tiny")) == [LAYER]
    with pytest.raises(UserError, match=r"is damaged .*; download it again"):
        file.read(names, "tiny")


def test_half_precision_is_of_the_file_alone(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2), "export.dtype=bfloat16", "save_every=1", "adapter.alpha=8")
    state = safetensors.torch.load_file(tmp_path / "run/lora/last/pytorch_lora_weights.safetensors")
    assert {one.dtype for one in state.values()} == {torch.bfloat16}
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=False)
    assert {one.dtype for one in checkpoint["state_dict"].values()} == {torch.float32}


def test_numbers_beyond_half_precision_are_written_in_float32(run, tiny, pairs, tmp_path):
    big = {DOWN: torch.full((2, 64), 1e3), UP: torch.full((64, 2), 1e5)}
    (tmp_path / "x.safetensors").write_bytes(stored(big))
    more = ["adapter.rank=2", f"adapter.target_modules={LAYER[12:]}", f"adapter.init_from={tmp_path / 'x.safetensors'}"]
    more += ["optimizer.lr=0", "optimizer.weight_decay=0", "export.dtype=float16", "save_every=0"]
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 1), *more)
    assert "exceeds the range of float16: " in outcome.text
    state = safetensors.torch.load_file(tmp_path / "run/lora/last/pytorch_lora_weights.safetensors")
    assert torch.equal(state[UP], big[UP])


def test_what_could_not_be_exported_is_tried_again_and_not_taken_for_saved(run, tiny, pairs, tmp_path, monkeypatch):
    from lightning_modules.lora_files import writing

    save, tries = writing.write, []

    def fail_once(*arguments, **more):
        tries.append(arguments)
        if len(tries) == 1:
            raise UserError("cannot write: no space left")
        save(*arguments, **more)

    monkeypatch.setattr(writing, "write", fail_once)
    outcome = run("train", *short(tiny, pairs, tmp_path / "run", 2), ok=False)
    assert "no space left" in outcome.error
    assert (tmp_path / "run/lora/last/pytorch_lora_weights.safetensors").is_file()
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
