"""Transformers in single files, as ComfyUI's users have them: the same weights, or one line that says why not."""

import json
import struct
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import nn

from foundation.catalogue import shipped_configuration
from foundation.errors import UserError
from lightning_modules.adapters.fusing import write_fused
from lightning_modules.families.z_image.module import NATIVE_NAMES
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.pretrained.repository import meta_component, read_index
from lightning_modules.pretrained.single_file import GGUFWeights
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.eight_bit import rotate
from lightning_modules.quantization.linear import SCALES, QuantizedLinear
from tests.support.combinations import first
from tests.support.commands import class_of, compose, run_task
from tests.support.foreign_files import native_state
from tests.support.quantized import CPU, quantization
from tests.support.tiny_pipelines import DIFFERENT, every_model

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Q8_0 = gguf.GGMLQuantizationType.Q8_0
INT8_NOTE = {"format": "int8_tensorwise"}


def source_of(model, repository, name, dtype=torch.bfloat16, quantized=None):
    """Return the transformer of a file, or of the repository, as the model's module would have it."""
    kind = class_of(model)
    more = kind.layers.native, str(repository)
    return TransformerSource(kind.transformer_class, str(name), None, dtype, quantized, 0, *more)


class Files:
    """A tiny model's transformer, written to files in every way."""

    def __init__(self, model, repository, folder, dtype=torch.bfloat16):
        self.model, self.repository, self.folder = model, repository, folder
        source = source_of(model, repository, repository, dtype)
        self.native, self.meta = source.native, source.meta
        self.own = source.load(CPU)
        self.state = self.own.state_dict()
        self.layers = {name for name, module in self.meta.named_modules() if isinstance(module, nn.Linear)}

    def in_native_names(self) -> dict[str, torch.Tensor]:
        return native_state(self.state, self.meta, self.native)

    def quantized(self, quantize: Callable, scale_name: str, per_row: bool, note: dict | None = None, everything=False):
        """Quantize the layers in native names that stand for linear layers."""
        names = LayerNames(self.meta, self.native)
        found = {}
        for key, tensor in self.in_native_names().items():
            layer, _, part = key.rpartition(".")
            if part != "weight" or names.meaning(layer) is None or tensor.dim() != 2:
                found[key] = quantize(tensor, None)[0] if everything else tensor
                continue
            maxima = tensor.float().abs().amax(1, keepdim=True) if per_row else tensor.float().abs().max()
            found[key], scale = quantize(tensor.float(), maxima.clamp_min(1e-6))
            if scale_name:
                found[f"{layer}.{scale_name}"] = scale
            if note:
                fits = tensor.shape[1] % 4 == 0
                kept = {name: value for name, value in note.items() if fits or "convrot" not in name}
                found[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)
        return found

    def write(self, state: dict[str, torch.Tensor], name: str = "model.safetensors", prefix: str = ""):
        path = self.folder / name
        save_file({prefix + key: tensor.contiguous() for key, tensor in state.items()}, path)
        return path

    def source(self, path, **more):
        return source_of(self.model, self.repository, path, **more)


def fp8(dtype):
    def quantize(weight, maxima):
        scale = maxima / torch.finfo(dtype).max
        return (weight / scale).to(dtype), scale

    return quantize


def int8(weight, maxima):
    scale = maxima / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def convrot(weight, _):
    rotated = rotate(weight, 4 if weight.shape[1] % 4 == 0 else 1)
    return int8(rotated, rotated.abs().amax(1, keepdim=True).clamp_min(1e-6))


def close(writer):
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def gguf_file(files, type):
    """Write the native tensors by the gguf library, as ComfyUI-GGUF's converter does; return their values, too."""
    path, values = files.folder / f"{type.name}.gguf", {}
    writer = gguf.GGUFWriter(path, "flux")
    for key, tensor in files.in_native_names().items():
        array, kind = tensor.float().numpy(), type
        if array.ndim != 2 or array.shape[1] % gguf.GGML_QUANT_SIZES[type][0]:
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quantize(array, kind)
        writer.add_tensor(key, data, raw_dtype=kind)
        values[key] = torch.from_numpy(gguf.dequantize(data, kind).copy())
    close(writer)
    return path, values


@pytest.fixture(scope="module")
def files_of(repositories, tmp_path_factory):
    made = {}

    def get(model):
        if model not in made:
            made[model] = Files(model, repositories[model], tmp_path_factory.mktemp(model))
        return made[model]

    return get


def dequantized(model):
    """Return a transformer's weights by name, those of quantized layers dequantized."""
    state = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    layers = {name: one for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    return state | {f"{name}.weight": one.dequantize(torch.float32) for name, one in layers.items()}


def assert_equal(model, state):
    own = dequantized(model)
    assert own.keys() == state.keys()
    assert not [name for name in state if not torch.equal(own[name].float(), state[name].float())]


FLUX = "flux_kontext"
OTHERS = [name for name in DIFFERENT if name != FLUX]


@pytest.mark.parametrize(
    ("model", "prefix"),
    first(2, [(FLUX, "model.diffusion_model."), (FLUX, "diffusion_model."), *((one, "") for one in OTHERS)]),
)
def test_weights_in_the_authors_names_are_those_of_the_repository(model, prefix, files_of):
    files = files_of(model)
    loaded = files.source(files.write(files.in_native_names(), prefix=prefix)).load(CPU)
    assert_equal(loaded, files.state)


@every_model
def test_weights_in_diffusers_names_are_those_of_the_repository(model, files_of):
    files = files_of(model)
    assert_equal(files.source(files.write(files.state)).load(CPU), files.state)


QUANTIZED = {
    "fp8 plain": (lambda weight, _: (weight.to(E4M3), None), "", False, None),
    "all in fp8": (lambda weight, _: (weight.to(E4M3), None), "", False, None, True),
    "fp8 e5m2 plain": (lambda weight, _: (weight.to(E5M2), None), "", False, None),
    "fp8 scaled": (fp8(E4M3), "scale_weight", False, None),
    "fp8 by ComfyUI": (fp8(E4M3), "weight_scale", False, {"format": "float8_e4m3fn"}),
    "int8": (int8, "weight_scale", False, INT8_NOTE),
    "int8 a row": (int8, "weight_scale", True, {**INT8_NOTE, "per_row": True}),
    "ConvRot": (convrot, "weight_scale", True, {**INT8_NOTE, "convrot": True, "convrot_groupsize": 4}),
}


@pytest.mark.parametrize(
    ("model", "way"),
    first(
        len(QUANTIZED),
        [*((FLUX, way) for way in QUANTIZED), *((one, way) for one in OTHERS for way in ("fp8 by ComfyUI", "ConvRot"))],
    ),
)
def test_quantized_weights_are_loaded_as_they_are(model, way, files_of):
    """Values are weight times scale, and scales are split with the layers that are joined."""
    files = files_of(model)
    state = files.quantized(*QUANTIZED[way])
    loaded = files.source(files.write(state)).load(CPU)
    kinds = {type(module) for name, module in loaded.named_modules() if name in files.layers}
    assert QuantizedLinear in kinds
    values = {}
    for key, tensor in state.items():
        scales = [state[name] for end in SCALES if (name := f"{key.removesuffix('.weight')}.{end}") in state]
        if key.endswith((*SCALES, "comfy_quant")):
            continue
        values[key] = tensor.float() * (scales[0] if scales and key.endswith(".weight") else 1)
        if way == "ConvRot" and tensor.dtype == torch.int8 and tensor.shape[1] % 4 == 0:
            values[key] = rotate(values[key], 4)
    expected = files.source(files.write(values, "values.safetensors"), dtype=torch.float32).load(CPU)
    own = dequantized(loaded)
    for name, parameter in expected.named_parameters():
        wanted = parameter if name.removesuffix(".weight") in files.layers else parameter.to(own[name].dtype)
        torch.testing.assert_close(own[name].float(), wanted.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model", "type"),
    first(3, [*((FLUX, type) for type in ("Q8_0", "BF16", "F16")), *((one, "Q8_0") for one in OTHERS)]),
)
def test_gguf_is_dequantized_by_its_library(model, type, files_of):
    files = files_of(model)
    path, values = gguf_file(files, gguf.GGMLQuantizationType[type])
    expected = files.source(files.write(values, "values.safetensors"), dtype=torch.float32).load(CPU)
    assert_equal(files.source(path, dtype=torch.float32).load(CPU), dict(expected.named_parameters()))


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_blocks_of_every_type_are_dequantized(type, tmp_path):
    """The library writes none of these types: the blocks are made up, with scales of a usual size."""
    kind = gguf.GGMLQuantizationType[type]
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "flux")
    data = np.random.default_rng(0).integers(0, 60, gguf.quant_shape_to_byte_shape((8, 512), kind), dtype=np.uint8)
    writer.add_tensor("whole", data, raw_dtype=kind)
    writer.add_tensor("reshaped", data, raw_dtype=kind)
    writer.add_array("comfy.gguf.orig_shape.reshaped", [16, 256])
    close(writer)
    weights, values = GGUFWeights(tmp_path / "k.gguf"), torch.from_numpy(gguf.dequantize(data, kind))
    assert weights.shapes == {"whole": (8, 512), "reshaped": (16, 256)}
    assert weights.type == type
    assert torch.equal(weights.read("whole"), values)
    assert torch.equal(weights.read("reshaped"), values.reshape(16, 256))


def test_a_file_is_quantized_to_a_folder(flux, tmp_path):
    """task=quantize: what is read from the folder is what is read from the file."""
    path = gguf_file(flux, Q8_0)[0]
    repository = f"model.pretrained_model_name_or_path={flux.repository}"
    of_file = ["model=flux_kontext_fp8", repository, f"model.transformer_name_or_path={path}"]
    run_task("quantize", *of_file, f"output_dir={tmp_path}")
    settings = instantiate(compose("predict", *of_file).model.quantization)
    assert_equal(flux.source(tmp_path).load(CPU), dequantized(flux.source(path, quantized=settings).load(CPU)))


@pytest.mark.parametrize("format", ["fp8 by ComfyUI", "int8", "ConvRot"])
def test_a_quantized_file_with_a_lora_in_it_is_written_and_read(format, flux, tmp_path):
    """Joined layers share a scale in the file, and have one each in the folder."""
    source = flux.source(flux.write(flux.quantized(*QUANTIZED[format])))
    write_fused(source, {}, tmp_path / "fused", CPU)
    before = source.load(CPU)
    assert_equal(flux.source(tmp_path / "fused").load(CPU), dequantized(before))
    name, layer = next((name, one) for name, one in before.named_modules() if isinstance(one, QuantizedLinear))
    delta = LowRank(torch.ones(1, layer.in_features), torch.ones(layer.out_features, 1))
    write_fused(source, {name: delta}, tmp_path / "updated", CPU)
    updated = flux.source(tmp_path / "updated").load(CPU).get_submodule(name)
    assert (updated.group > 1) == (format == "ConvRot")
    change = updated.dequantize(torch.float32) - layer.dequantize(torch.float32)
    assert (change.mean() - 1).abs() < 0.05


@pytest.fixture(scope="module")
def flux(files_of):
    return files_of("flux_kontext")


def test_8_bits_are_quantized_again_to_4_if_these_are_configured(flux):
    path = flux.write(flux.quantized(fp8(E4M3), "scale_weight", False))
    nf4 = flux.source(path, quantized=quantization("nf4"))
    assert nf4.precision == "nf4"
    values = dequantized(flux.source(path).load(CPU))
    layer = nf4.load(CPU).transformer_blocks[0].attn.to_q
    assert layer.storage.startswith("nf4")
    plain = nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)
    plain.weight.data = values["transformer_blocks.0.attn.to_q.weight"].to(torch.bfloat16)
    wanted = quantization("nf4").quantize(plain).dequantize(torch.float32)
    assert torch.equal(layer.dequantize(torch.float32), wanted)
    assert flux.source(path, quantized=quantization("int8_w8a8")).precision == "fp8"  # nothing to gain


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "net.", "module.net._orig_mod.", "pipe.dit."])
def test_a_checkpoint_of_all_parts_is_read_without_the_others(flux, caplog, prefix):
    state = {f"{prefix}{key}": tensor for key, tensor in flux.in_native_names().items()}
    averages = {f"model_ema.{key}": tensor + 1 for key, tensor in flux.in_native_names().items()}
    others = ("vae.encoder.conv_in.weight", "v_pred", "denoiser.sigmas", "model_emaimg_in")
    path = flux.write(averages | state | {name: ONE.clone() for name in others}, f"{prefix}safetensors")
    with caplog.at_level("INFO", "retouch"):
        assert_equal(flux.source(path).load(CPU), flux.state)
    assert f"denoiser, model_ema, model_emaimg_in and 2 more of {prefix}safetensors are not used" in caplog.text


def test_the_config_next_to_a_file_counts(flux):
    """A model of fewer blocks than its pipeline's."""
    folder = flux.folder / "pruned"
    folder.mkdir()
    kept = {name: one for name, one in flux.state.items() if not name.startswith("transformer_blocks.1.")}
    save_file(kept, folder / "pruned.safetensors")
    with pytest.raises(UserError, match=r"pruned.safetensors lacks transformer_blocks.1.*is it complete, and"):
        flux.source(folder / "pruned.safetensors").check_files()
    (folder / "config.json").write_text(json.dumps({**flux.own.config, "num_layers": 1}))
    assert_equal(flux.source(folder / "pruned.safetensors").load(CPU), kept)


def refusal(files, path):
    """Return the one line by which a file is refused, before weights are read."""
    with pytest.raises(UserError) as caught:
        files.source(path).check_files()
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def changed(**tensors):
    """Return a change of a file's tensors; None removes one."""

    def change(state):
        found = state | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    return change


def noted(**note):
    tensor = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    return changed(double_blocks__0__img_attn__proj__comfy_quant=tensor)


ONE, BYTES = torch.ones(1), torch.zeros(9, 1, dtype=torch.uint8)
REFUSED = {
    "a LoRA": (lambda _: {"double_blocks.0.img_attn.proj.lora_down.weight": ONE}, "is a LoRA: pass it by lora="),
    "nunchaku": (changed(single_blocks__0__linear1__wscales=ONE), "quantized by nunchaku"),
    "nvfp4": (noted(format="nvfp4"), "quantized by nvfp4, which is not read: use the model's 16-bit"),
    "quanto": (changed(img_in__weight=None, img_in__weight___data=ONE), "quantized by quanto, which is not read"),
    "torchao": (changed(**{"img_in.weight": None, "img_in.weight:qdata": ONE}), "quantized by torchao, which is not"),
    "HQQ": (changed(img_in__weight=None, img_in__W_q=ONE), "quantized by nunchaku (SVDQuant) or a similar program"),
    "nvfp4 without a note": (changed(img_in__weight_scale_2=ONE), "quantized to nvfp4"),
    "mxfp8": (noted(format="mxfp8"), "quantized by mxfp8"),
    "ConvRot in 4 bits": (noted(format="convrot_w4a4", convrot_groupsize=256), "quantized by convrot_w4a4"),
    "a missing tensor": (changed(img_in__bias=None), "lacks x_embedder.bias"),
    "an unknown tensor": (changed(double_blocks__9__mystery=ONE), "has double_blocks.9.mystery, which its model"),
    "4 bits of joined layers": (changed(double_blocks__0__img_attn__qkv__weight=BYTES), "qkv.weight in 4 bits, which"),
    "4 bits of a swapped layer": (
        changed(final_layer__adaLN_modulation__1__weight=BYTES),
        "has final_layer.adaLN_modulation.1.weight in 4 bits, which cannot be split",
    ),
    "a part without the prefix of the others": (
        lambda state: {f"net.{key}" if key != "img_in.bias" else key: tensor for key, tensor in state.items()},
        "lacks x_embedder.bias",
    ),
    "another shape": (changed(img_in__bias=torch.ones(3)), "has x_embedder.bias of 3, FluxTransformer2DModel of 64"),
    "both names": (changed(x_embedder__bias=torch.ones(64)), "has x_embedder.bias twice, as"),
    "integers": (changed(img_in__bias=torch.ones(64, dtype=torch.int32)), "in I32, whose scales are not known"),
    "int8 without scales": (
        lambda state: state | {"img_in.weight": state["img_in.weight"].to(torch.int8)},
        "lacks the scales of x_embedder",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_not_the_transformer_is_refused_with_its_kind(kind, flux):
    change, words = REFUSED[kind]
    assert words in refusal(flux, flux.write(change(flux.in_native_names()), "refused.safetensors"))


def header(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def overlapping(_):
    part = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return header(json.dumps({"a": part, "b": part}).encode()) + bytes(8)


DAMAGED = {
    "cut off": lambda whole: whole[: len(whole) // 2],
    "a header of 1 GB": lambda _: header(b"{" + b" " * 100, 10**9),
    "overlapping offsets": overlapping,
    "zeros": lambda _: bytes(4096),
    "a web page": lambda _: b"<!doctype html><html>" + bytes(100),
    "nothing": lambda _: b"",
    "impossible counts": lambda _: b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(64),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_line(damage, suffix, flux):
    whole = flux.write(flux.in_native_names()) if suffix == ".safetensors" else gguf_file(flux, Q8_0)[0]
    path = flux.folder / f"damaged{suffix}"
    path.write_bytes(DAMAGED[damage](whole.read_bytes()))
    assert len(refusal(flux, path)) < 300


def test_a_gguf_file_of_a_type_that_is_not_read_is_refused(flux):
    writer = gguf.GGUFWriter(flux.folder / "q8_k.gguf", "flux")
    kind = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("a", np.zeros(gguf.quant_shape_to_byte_shape((1, 256), kind), np.uint8), raw_dtype=kind)
    close(writer)
    assert "Q8_K" in refusal(flux, flux.folder / "q8_k.gguf")


def test_a_file_of_another_model_names_that_model(flux):
    """The other file has Z-Image's names and shapes, in float16 without content."""
    folder, path = shipped_configuration("Tongyi-MAI/Z-Image"), flux.folder / "z_image.safetensors"
    meta = meta_component(str(folder), "transformer")
    offset, table = 0, {}
    for name, tensor in native_state(meta.state_dict(), meta, NATIVE_NAMES).items():
        end = offset + 2 * tensor.numel()
        table[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    path.write_bytes(header(json.dumps(table).encode()))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + offset)  # sparse
    assert "is a transformer of Tongyi-MAI/Z-Image. Choose model=z_image" in refusal(flux, path)


def test_edit_2511_in_a_file_needs_its_base(files_of):
    """ComfyUI's mark of the file; the shapes are those of older versions."""
    files = files_of("qwen_image_edit_plus")
    path = files.write(files.in_native_names() | {"__index_timestep_zero__": torch.zeros(0)})
    files.source(path).check_files()
    older = files.source(path)
    older.meta.register_to_config(zero_cond_t=False)
    with pytest.raises(UserError, match=r"needs a model\.pretrained_model_name_or_path with zero_cond_t"):
        older.check_files()


@pytest.mark.parametrize("name", ["missing.safetensors", "~/missing.gguf"])
def test_a_file_that_is_not_there_is_named(name, flux):
    with pytest.raises(UserError, match="the file does not exist"):
        _ = flux.source(name).repository


@pytest.mark.parametrize("suffix", ["SAFETENSORS", "Sft"])
def test_the_suffix_may_have_capitals(flux, suffix):
    path = flux.write(flux.in_native_names()).rename(flux.folder / f"FILE.{suffix}")
    assert_equal(flux.source(path).load(CPU), flux.state)
    path.unlink()
    torch.save({"a": ONE}, flux.folder / "old.CKPT")
    assert "pickle of PyTorch: save it as .safetensors" in refusal(flux, flux.folder / "old.CKPT")


def test_a_folder_of_single_files_names_them_and_their_settings(flux, tmp_path):
    flux.write(flux.in_native_names()).rename(tmp_path / "flux1-dev.safetensors")
    words = "It contains flux1-dev.safetensors; .*model.transformer_name_or_path, model.text_encoder_name_or_path"
    for read in (lambda: flux.source(tmp_path).check_files(), lambda: read_index(str(tmp_path))):
        with pytest.raises(UserError, match=words):
            read()
