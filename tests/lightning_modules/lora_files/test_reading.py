"""LoRA files that are damaged, hostile or of another kind: one short line each."""

import io
import json
import struct
import tarfile

import pytest
import safetensors.torch
import torch

from foundation.errors import UserError
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.reading import LoRAFile, find_or_download, find_weights
from lightning_modules.lora_files.writing import write
from tests.support.commands import short
from tests.support.foreign_files import flux
from tests.support.lora_files import layer_names

LAYER = "transformer.transformer_blocks.0.attn.to_q"
GOOD = {f"{LAYER}.lora_A.weight": torch.ones(2, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 2)}
DOWN, UP = GOOD


def raw(header: bytes, data: bytes = b"") -> bytes:
    """Write a safetensors file by hand."""
    return struct.pack("<Q", len(header)) + header + data


def stored(state, metadata=None) -> bytes:
    return safetensors.torch.save({key: one.clone() for key, one in state.items()}, metadata)


def with_header(**settings) -> bytes:
    """Return a LoRA with settings of peft in diffusers' header."""
    named = {f"transformer.{key}": value for key, value in settings.items()}
    return stored(GOOD, {"lora_adapter_metadata": json.dumps(named)})


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("pytorch_lora_weights.safetensors"))
    return content.getvalue()


OUTSIDE = json.dumps({DOWN: {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 10**12]}}).encode()
SLOW = "(([a-z_0-9.]|[a-z])+)+[A-Z]"
UNREAD = "contains tensors that Retouch does not read ("
FILES = {
    "empty": (b"", "is an empty file"),
    "no safetensors": (b"\x80\x04pickle" * 10, "is a pickle of PyTorch"),
    "a GGUF file": (b"GGUF\x03" + bytes(60), "is a GGUF file; name a LoRA's safetensors file"),
    "an offset outside": (raw(OUTSIDE, b"\0" * 64), "is damaged"),
    "a header of 100 MB": (raw(b'{"__metadata__":{"a":"' + b"x" * 10**8 + b'"}}'), "its header has 100,000,025 bytes"),
    "not a number": (stored(GOOD | {UP: torch.full((64, 2), torch.nan)}), "lora_B.weight): training diverged"),
    "NaN in diffusers' header": (with_header(lora_alpha=torch.nan), "is not finite"),
    "a pattern that is none": (with_header(lora_alpha=1, alpha_pattern={"(": 1}), "alpha_pattern: "),
    "a pattern that takes for ever": (with_header(lora_alpha=1, alpha_pattern={SLOW: 1}), "alpha_pattern: "),
    "ranks that differ": (stored(GOOD | {UP: torch.ones(64, 3)}), "has matrices of (2, 64) and (64, 3)"),
    "a convolution": (stored({DOWN: torch.ones(2, 64, 3, 3), UP: torch.ones(64, 2, 1, 1)}), "has matrices of"),
    "AdaLoRA": (
        stored({f"{LAYER}.{name}": torch.ones(2, 2) for name in ("lora_A", "lora_B", "lora_E", "ranknum")}),
        "contains tensors of AdaLoRA that Retouch does not read (",
    ),
    "AdaLoRA by its settings": (with_header(beta1=0.85, peft_type="ADALORA"), "was saved by peft with peft_type=ADALO"),
    "VeRA by its tensors": (stored({f"{LAYER}.vera_lambda_b": torch.ones(2)}), "tensors of VeRA that Retouch"),
    "a tar": (tar(), "is a tar archive; name a LoRA's"),
    "one half": (stored({DOWN: GOOD[DOWN]}), "half of an update"),
    "text encoders alone": (
        stored({"lora_te1_x.lora_down.weight": torch.ones(2, 4), "lora_te1_x.lora_up.weight": torch.ones(4, 2)}),
        "only weights of text encoders",
    ),
    "a whole model": (
        stored({"transformer_blocks.0.attn.to_q.weight": torch.ones(4, 4)}),
        "is not a LoRA: it has transformer_blocks.0.attn.to_q.weight. A model's own weights are set by",
    ),
    "LoKr": (
        stored({"lycoris_x.lokr_w1": torch.ones(2, 2), "lycoris_x.alpha": torch.ones(1)}),
        "only alpha and lokr_w1, half",
    ),
    "biases": (stored(GOOD | {f"{LAYER}.lora_B.bias": torch.ones(64)}), UNREAD + "transformer."),
    "two adapters": (
        stored({key.replace(".weight", f".{name}.weight"): one for key, one in GOOD.items() for name in "ab"}),
        "contains several adapters",
    ),
    "two adapters in different layers": (
        stored(
            {
                key.replace(".weight", f".{name}.weight").replace("to_q", layer): one
                for layer, name in (("to_q", "default"), ("to_k", "second"))
                for key, one in GOOD.items()
            }
        ),
        "contains several adapters",
    ),
    "many names": (
        stored({f"{'y' * 400}{number}.lora_{half}.weight": torch.ones(4, 4) for half in "AB" for number in range(99)}),
        "is not in the model and 96 more",
    ),
    "another model's": (
        stored({f"lora_unet_input_blocks_4_1.lora_{half}.weight": torch.ones(4, 4) for half in ("down", "up")}),
        "lora_unet_input_blocks_4_1 is not in the model",
    ),
    "DoRA by columns": (
        stored(GOOD | {DOWN: torch.ones(2, 32), f"{LAYER}.dora_scale": torch.ones(1, 32)}),
        "contains a layer that Retouch does not read: transformer.",
    ),
    "DoRA of a LoKr": (
        stored({f"{LAYER}.{key}": torch.ones(8, 8) for key in ("lokr_w1", "lokr_w2")}
               | {f"{LAYER}.dora_scale": torch.ones(64, 1)}),
        "has lokr_w1 and lokr_w2 and magnitude, of two kinds",
    ),
    "PiSSA": (with_header(init_lora_weights="pissa_niter_4"), "saved by peft with init_lora_weights=pissa"),
}  # fmt: skip


@pytest.fixture(scope="module")
def names():
    return layer_names("flux_kontext", flux())


@pytest.mark.parametrize("name", FILES)
def test_one_short_line_says_what_is_wrong(names, tmp_path, name):
    content, message = FILES[name]
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError) as raised:
        LoRAFile(tmp_path / "x.safetensors").read(names, "tiny")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 700
    assert str(raised.value).isprintable()


def test_kernels_of_one_pixel_are_matrices(names, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(stored({key: tensor[:, :, None, None] for key, tensor in GOOD.items()}))
    [delta] = LoRAFile(path).read(names, "tiny").values()
    assert torch.equal(delta.matrix(), torch.full((64, 64), 2.0))


@pytest.mark.parametrize("suffix", [".SAFETENSORS", ".sft"])
def test_a_folders_only_file_is_found_whatever_its_suffix(tmp_path, suffix):
    path = tmp_path / f"LORA{suffix}"
    path.write_bytes(stored(GOOD))
    assert find_weights(tmp_path) == path
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(UserError, match=rf"but LORA{suffix}, other.safetensors. Choose one, as in .*LORA{suffix}"):
        find_weights(tmp_path)


def test_a_mistyped_run_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "snow").mkdir(parents=True)
    with pytest.raises(UserError, match=r"outputs.snwo: no such file or folder; did you mean outputs.snow\?"):
        find_or_download("outputs/snwo")


def test_half_precision_affects_only_the_file(runs):
    folder = runs(1, "export.dtype=bfloat16", "adapter.alpha=8").folder
    state = safetensors.torch.load_file(folder / "lora/last/pytorch_lora_weights.safetensors")
    assert {one.dtype for one in state.values()} == {torch.bfloat16}
    checkpoint = torch.load(folder / "checkpoints/last.ckpt", weights_only=False)
    assert {one.dtype for one in checkpoint["state_dict"].values()} == {torch.float32}


def test_numbers_beyond_half_precision_are_written_in_float32(tmp_path):
    big = LowRank(torch.full((2, 64), 1e3), torch.full((64, 2), 1e5))
    write(tmp_path / "x.safetensors", {"x": big}, {}, torch.float16)
    state = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert torch.equal(state["transformer.x.lora_B.weight"], big.up)


def test_failed_export_is_repeated_and_not_counted_as_saved(run, tiny, pairs, tmp_path, monkeypatch):
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
