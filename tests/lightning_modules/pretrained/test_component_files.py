"""Text encoders and autoencoders in single files, as ComfyUI's users have them: the repository's to the bit."""

import itertools
import re
import shutil

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers
from safetensors.torch import load_file, save_file
from torch import nn

from foundation import catalogue
from foundation.errors import UserError
from lightning_modules.adapters.full import FullFineTuning
from lightning_modules.pretrained.component_files import load_component, open_components
from lightning_modules.pretrained.repository import component_class
from lightning_modules.quantization.linear import QuantizedLinear
from tests.support.commands import unloaded
from tests.support.quantized import CPU, quantization
from tests.support.tiny_pipelines import edit_json

FLUX, QWEN, KLEIN, Z_IMAGE = "flux_kontext", "qwen_image_edit_plus", "flux2_klein_4b", "z_image"
TEXTS = {FLUX: ["text_encoder", "text_encoder_2"], QWEN: ["text_encoder"], KLEIN: ["text_encoder"]}
TEXTS[Z_IMAGE] = ["text_encoder"]
E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1)


def comfy(model, state):
    """Rename a text encoder's tensors as in ComfyUI's files, with the other tensors that these have."""
    if model == Z_IMAGE:
        return {f"model.{name}": tensor for name, tensor in state.items()}
    if "embeddings.position_embedding.weight" in state:
        others = {"text_model.embeddings.position_ids": torch.arange(77)[None], "logit_scale": ONE[0]}
        return {f"text_model.{k}": v for k, v in state.items()} | others | {"text_projection.weight": torch.eye(32)}
    if model == FLUX:
        return state | {"spiece_model": torch.zeros(9, dtype=torch.uint8)}
    return {name: tensor for name, tensor in state.items() if model == QWEN or name != "lm_head.weight"}


def is_linear(key, tensor):
    others = ("embed", "shared", "relative_attention_bias", "lm_head")
    return tensor.dim() == 2 and not any(word in key for word in others)


class Files:
    """The tensors of a tiny pipeline's components, and files of them."""

    def __init__(self, model, folder, written):
        self.model, self.folder, self.written = model, folder, written

    def state(self, name):
        found = {}
        for path in (self.folder / name).glob("*.safetensors"):
            found |= load_file(path)
        return found if name == "vae" else comfy(self.model, found)

    def write(self, state, name="file.safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, self.written / name)
        return str(self.written / name)

    def open(self, texts=None, vae=None):
        texts = [texts] if isinstance(texts, str) else texts or []
        return open_components({"text_encoder": texts, "vae": [vae] if vae else []}, str(self.folder), None)

    def reference(self, name, dtype):
        """Load a component by its library."""
        cls = component_class(str(self.folder), name)
        return cls.from_pretrained(self.folder, subfolder=name, dtype=dtype).requires_grad_(False)


@pytest.fixture
def files_of(repositories, tmp_path):
    return lambda model: Files(model, repositories[model], tmp_path)


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_equal(model, expected):
    own = tensors(model)
    assert own.keys() == expected.keys()
    assert [name for name, one in expected.items() if own[name].dtype != one.dtype or not own[name].equal(one)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", TEXTS)
def test_a_file_is_the_repositorys_component_to_the_bit(files_of, model, dtype):
    files = files_of(model)
    found = files.open(vae=files.write(files.state("vae")))["vae"]
    assert_equal(found.load(CPU, dtype, None), tensors(files.reference("vae", dtype)))
    for name in TEXTS[model]:
        found = files.open(files.write(files.state(name)))
        assert [*found] == [name]
        expected = tensors(files.reference(name, dtype))
        if model == KLEIN:
            del expected["lm_head.weight"]
        assert_equal(found[name].load(CPU, dtype, None), expected)


@pytest.mark.parametrize("stored", [("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_weights_that_t5_shares_may_have_either_name(files_of, stored):
    files = files_of(FLUX)
    state = files.state("text_encoder_2")
    embedding = state.pop("shared.weight")
    state |= {f"{name}.weight": embedding.clone() for name in stored}
    t5 = files.open(files.write(state))["text_encoder_2"].load(CPU, torch.float32, None)
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    assert t5.shared.weight.equal(embedding)


def test_a_head_is_kept_if_the_file_has_one_of_its_own(files_of):
    files = files_of(QWEN)
    state = files.state("text_encoder")
    without = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    for path, kind in ((files.write(state), nn.Linear), (files.write(without, "without.safetensors"), nn.Identity)):
        loaded = files.open(path)["text_encoder"].load(CPU, torch.float32, None)
        assert type(loaded.lm_head) is kind


@pytest.mark.parametrize("more", [[], ["lm_head.weight"]], ids=str)
def test_a_head_that_is_the_embedding_is_not_stored_again(files_of, tmp_path, more):
    files = files_of(KLEIN)
    shutil.copytree(files.folder, tmp_path / "tied")
    files.folder = tmp_path / "tied"
    edit_json(files.folder / "text_encoder" / "config.json", tie_word_embeddings=True)
    state = files.state("text_encoder")
    state |= {name: state["model.embed_tokens.weight"].clone() for name in more}
    save_file(state, files.folder / "text_encoder" / "model.safetensors", {"format": "pt"})
    expected = tensors(files.reference("text_encoder", torch.float32))
    assert_equal(files.open(files.write(state))["text_encoder"].load(CPU, torch.float32, None), expected)


def test_a_tensor_by_two_names_is_refused(files_of):
    files = files_of(QWEN)
    state = files.state("text_encoder")
    name = next(name for name in state if name.startswith("model.layers.0."))
    other = name.replace("model.", "model.language_model.", 1)
    with pytest.raises(UserError, match=rf"file.safetensors fits no .* has {other} twice, as {other} and {name}"):
        files.open(files.write(state | {other: state[name] + 1}))


def fp8(state, layers, scaled):
    """Quantize the layers, with scales, or all tensors without; return their values as well."""
    quantized, values = {}, {}
    for key, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        scale = tensor.abs().max().clamp_min(1e-6) / 448 if scaled else ONE[0]
        chosen = not scaled or key in layers
        quantized[key] = (tensor / scale).to(E4M3) if chosen else tensor
        values[key] = quantized[key].float() * scale if chosen else tensor
        if scaled and chosen:
            quantized[f"{key.removesuffix('weight')}{scaled}"] = scale
    return quantized | ({"scaled_fp8": torch.zeros(2).to(E4M3)} if scaled == "scale_weight" else {}), values


@pytest.mark.parametrize(
    ("model", "scaled"), [(QWEN, None), (FLUX, "scale_weight"), *((model, "weight_scale") for model in TEXTS)]
)
def test_fp8_layers_stay_fp8_with_the_files_values(files_of, model, scaled):
    files = files_of(model)
    name = TEXTS[model][-1]
    state, reference = files.state(name), files.reference(name, torch.float32)
    layers = {key for key, tensor in state.items() if is_linear(key, tensor)}
    quantized, values = fp8(state, layers, scaled)
    file = files.open(files.write(quantized))[name]
    assert file.weights.format == "fp8"
    loaded = file.load(CPU, torch.float32, None)
    plain = files.open(files.write(values, "values.safetensors"))[name].load(CPU, torch.float32, None)
    for path, module in loaded.named_modules():
        expected = plain.get_submodule(path)
        if isinstance(expected, nn.Linear) and path != "lm_head":
            assert isinstance(module, QuantizedLinear), path
            assert torch.allclose(module.dequantize(torch.float32), expected.weight, rtol=1e-6, atol=0)
    ids = torch.arange(8)[None]
    states = [one.base_model(input_ids=ids).last_hidden_state for one in (loaded, plain, reference)]
    assert torch.allclose(states[0], states[1], rtol=1e-4, atol=1e-4)
    assert not torch.equal(states[1], states[2])


def test_layers_are_quantized_by_the_settings(files_of):
    files = files_of(FLUX)
    file = files.open(files.write(files.state("text_encoder_2")))["text_encoder_2"]
    loaded = file.load(CPU, torch.bfloat16, quantization("nf4"))
    assert isinstance(loaded.encoder.block[0].layer[0].SelfAttention.q, QuantizedLinear)


def test_a_repositorys_layers_stay_fp8(files_of, tmp_path):
    files, name = files_of(FLUX), "text_encoder_2"
    folder = shutil.copytree(files.folder, tmp_path / "fp8")
    state = files.state(name)
    quantized = fp8(state, {key for key, tensor in state.items() if is_linear(key, tensor)}, "weight_scale")[0]
    single = files.open(files.write(quantized))[name].load(CPU, torch.float32, None)
    shutil.copy(tmp_path / "file.safetensors", folder / name / "model.safetensors")
    loaded = load_component(str(folder), name)
    assert_equal(loaded, tensors(single))
    assert isinstance(loaded.encoder.block[0].layer[0].SelfAttention.q, QuantizedLinear)
    with pytest.raises(UserError, match="T5EncoderModel is quantized on disk"):
        FullFineTuning(text_encoders=True).inject(loaded)


PARTS = ("norm1", "conv1", "norm2", "conv2", "nin_shortcut", "norm", "q", "k", "v", "proj_out")
WAN_PARTS = ("residual.0", "residual.2", "residual.3", "residual.6", "shortcut", "resample.1", "time_conv")
SIDES = (("encoder", "down"), ("decoder", "up"))


def authors_names(model, convert):
    """Return the authors' names by diffusers': of all conceivable ones those that it converts to a tensor's name."""
    layers = ["quant_conv", "post_quant_conv", "conv1", "conv2"]
    for side, way in SIDES:
        layers += [f"{side}.{one}" for one in ("conv_in", "norm_out", "conv_out", "conv1", "head.0", "head.2")]
        blocks = [f"{side}.{way}.{i}.block.{j}" for i, j in itertools.product(range(4), range(3))]
        blocks += [f"{side}.mid.{one}" for one in ("block_1", "attn_1", "block_2")]
        layers += [f"{block}.{part}" for block in blocks for part in PARTS]
        layers += [f"{side}.{way}.{i}.{way}sample.conv" for i in range(4)]
        blocks = [f"{side}.{way}samples.{i}" for i in range(16)] + [f"{side}.middle.{i}" for i in range(3)]
        layers += [f"{block}.{part}" for block in blocks for part in (*WAN_PARTS, "norm", "to_qkv", "proj")]
    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias", "gamma")]
    numbers = convert({name: torch.tensor(i) for i, name in enumerate(names)}, config=model.config)
    own = model.state_dict()
    found = {key: names[int(number)] for key, number in numbers.items() if key in own and number is not None}
    assert {key.partition(".")[0] for key in own.keys() - found.keys()} <= {"bn"}
    return {key: found.get(key, key) for key in own}


def ldm(cls, **settings):
    return cls(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=2,
        norm_num_groups=4,
        latent_channels=4,
        **settings,
    )


def wan():
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip


AUTOENCODERS = {
    "FLUX.1": (lambda: ldm(AutoencoderKL, use_quant_conv=False, use_post_quant_conv=False), convert_ldm_vae_checkpoint),
    "FLUX.2": (lambda: ldm(AutoencoderKLFlux2), convert_ldm_vae_checkpoint),
    "Qwen-Image": (wan, convert_wan_vae_to_diffusers),
}


def in_authors_names(model, convert):
    """Rename an autoencoder's tensors; its attention was of 1x1 convolutions, and FLUX.2 has two layers elsewhere."""
    found = {}
    for key, name in authors_names(model, convert).items():
        tensor = model.state_dict()[key]
        if isinstance(model, AutoencoderKLFlux2) and "quant_conv" in name:
            name = f"{'decoder' if 'post' in name else 'encoder'}.{name}"
        is_matrix = ".attn_1." in name and tensor.dim() == 2
        found[name] = tensor[:, :, None, None] if is_matrix else tensor
    return found


@pytest.fixture(params=AUTOENCODERS)
def autoencoder(request, tmp_path):
    """Return the folder of a pipeline with an autoencoder of the real layout, and its tensors in the authors' names."""
    build, convert = AUTOENCODERS[request.param]
    model = build()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.1, 3.0)
    model.save_pretrained(tmp_path / "vae")
    (tmp_path / "model_index.json").write_text(f'{{"vae": ["diffusers", "{type(model).__name__}"]}}')
    return Files(request.param, tmp_path, tmp_path), in_authors_names(model, convert)


def test_a_file_in_the_authors_names_is_the_repositorys_autoencoder_to_the_bit(autoencoder):
    files, state = autoencoder
    start = {"FLUX.1": "", "FLUX.2": "vae.", "Qwen-Image": "first_stage_model."}[files.model]
    assert state.keys() != files.state("vae").keys()
    file = files.open(vae=files.write({start + name: tensor for name, tensor in state.items()}))["vae"]
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(file.load(CPU, dtype, None), tensors(files.reference("vae", dtype)))


def test_an_autoencoders_tensors_are_all_needed_and_used(autoencoder):
    files, state = autoencoder
    lacks = dict(state)
    lacks.pop(next(name for name in state if name.startswith("decoder.mid")))
    with pytest.raises(UserError, match=r"fits no component: as vae it lacks decoder.mid_block"):
        files.open(vae=files.write(lacks))
    with pytest.raises(UserError, match=r"it has decoder.mid.block_7.conv1.weight, which its model lacks"):
        files.open(vae=files.write(state | {"decoder.mid.block_7.conv1.weight": ONE}))
    large = next(name for name, tensor in state.items() if tensor.dim() > 3 and tensor.shape[-1] == 3)
    with pytest.raises(UserError, match=r"it has .* of \d+x\d+x.*, Autoencoder\w+ of "):
        files.open(vae=files.write(state | {large: state[large].transpose(0, 1)}))


def checkpoint(files):
    """Return the parts of one of ComfyUI's checkpoints."""
    found = {f"vae.{name}": tensor for name, tensor in files.state("vae").items()}
    for name in TEXTS[files.model]:
        state = files.state(name)
        found |= {f"text_encoders.{name}.transformer.{key}": tensor.clone() for key, tensor in state.items()}
    return found | {"model.diffusion_model.img_in.weight": ONE}


def module_of(files, *more):
    return unloaded(files.folder, files.model, "model.dtype=float32", *more)


def encodings(module):
    parts = module.base.components
    images = [torch.randint(256, (3, 32, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))]
    prompt = module.encode_prompt(parts, "make it snow", images if module.condition_images.text_sees_them else [])
    pixels = images[0][None] / 127.5 - 1
    mean, std = module.encode_pixels(parts["vae"], pixels)
    return prompt | {"mean": module.normalize(mean), "std": std}


@pytest.mark.parametrize("model", [pytest.param(one, marks=[] if one == FLUX else pytest.mark.slow) for one in TEXTS])
def test_prompts_and_images_are_encoded_as_by_the_repository(files_of, model, tmp_path):
    files = files_of(model)
    path = files.write(checkpoint(files), "checkpoint.safetensors")
    module, plain = module_of(files, *settings_of(path, path)), module_of(files)
    module.base.check()
    module.base.check_files()
    with torch.no_grad():
        ours, expected = encodings(module), encodings(plain)
    assert [name for name, one in expected.items() if not one.equal(ours[name])] == []
    memo = tmp_path / "memo"
    identity, before = (one.base.identity(memo)["model"] for one in (module, plain))
    assert identity.keys() == {
        *(name for name in before if "safetensors" not in name and name.split("/")[0] not in {*TEXTS[model], "vae"}),
        *(f"{name}/config.json" for name in (*TEXTS[model], "vae")),
        *TEXTS[model],
        "vae",
    }


DEV_FILES = {
    "full": lambda name: True,
    "as ComfyUI's": lambda name: not re.search(r"layers\.30\.|language_model\.model\.norm", name),
    "without its vision": lambda name: name.startswith("language_model") and not re.search(r"layers\.30\.", name),
}


@pytest.mark.parametrize(("kind", "start"), zip(DEV_FILES, ("language_model.model.", "model.", "model."), strict=True))
def test_prompts_are_encoded_by_flux2_devs_text_encoder_without_its_unused_parts(files_of, kind, start):
    files = files_of("flux2_dev")
    state = {name: one for name, one in files.state("text_encoder").items() if DEV_FILES[kind](name)}
    state = {name.replace("language_model.model.", start): one for name, one in state.items()}
    path = files.write(state | {"tekken_model": torch.zeros(9, dtype=torch.uint8)})
    module, plain = (module_of(files, *more) for more in ([f"model.text_encoder_name_or_path={path}"], []))
    module.base.check()
    with torch.no_grad():
        ours, expected = (one.encode_prompt(one.base.components, "make it snow", []) for one in (module, plain))
    assert ours["prompt_embeds"].equal(expected["prompt_embeds"])
    assert not hasattr(module.base.components["text_encoder"].model.vision_tower, "ln_pre")


@pytest.mark.parametrize("lacking", ["layers.29.", "embed_tokens"])
def test_parts_of_flux2_devs_text_encoder_that_are_used_are_needed(files_of, lacking):
    files = files_of("flux2_dev")
    state = {name: one for name, one in files.state("text_encoder").items() if lacking not in name}
    with pytest.raises(UserError, match=f"as text_encoder it lacks .*{lacking}"):
        files.open(files.write(state))


def settings_of(texts, vae):
    return [f"model.text_encoder_name_or_path={texts}", f"model.vae_name_or_path={vae}"]


def test_statistics_of_flux2_are_those_of_the_file(files_of):
    files = files_of(KLEIN)
    state = files.state("vae")
    path = files.write(state | {"bn.running_mean": state["bn.running_mean"] + 1})
    module, plain = module_of(files, f"model.vae_name_or_path={path}"), module_of(files)
    read = [one.base.vae_tensor("bn.running_mean") for one in (module, plain)]
    assert read[0].equal(read[1] + 1)


def test_layers_that_stay_in_fp8_count_as_one_byte(files_of):
    files = files_of(FLUX)
    t5 = files.reference("text_encoder_2", torch.float32)
    layers = {f"{name}.weight" for name, module in t5.named_modules() if isinstance(module, nn.Linear)}
    path = files.write(fp8(files.state("text_encoder_2"), layers, "scale_weight")[0])
    base, plain = (module_of(files, *more).base for more in ([f"model.text_encoder_name_or_path={path}"], []))
    whole, small = (one.components.weight_bytes("text_encoder_2", t5) for one in (plain, base))
    assert whole - small == 3 * sum(one.numel() for name, one in t5.named_parameters() if name in layers)
    assert base.provenance()["text_encoder_2_precision"] == "fp8"
    linears = [one for one in base.components["text_encoder_2"].modules() if isinstance(one, QuantizedLinear)]
    assert linears
    assert not any(one.rounds for one in linears)  # inputs, on devices that multiply in 8 bits


def test_a_known_model_in_files_needs_no_network(files_of, tmp_path, monkeypatch):
    """Its small files are in Retouch's own folder, which lacks the weights."""
    files = files_of(FLUX)
    folder = tmp_path / "configurations" / "black-forest-labs--FLUX.1-Kontext-dev"
    shutil.copytree(files.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(catalogue, "CONFIGURATIONS", folder.parent)
    path = files.write(checkpoint(files), "checkpoint.safetensors")
    transformer = next((files.folder / "transformer").glob("*.safetensors"))
    with torch.no_grad():
        expected = encodings(module_of(files))
        files.folder = "black-forest-labs/FLUX.1-Kontext-dev"
        module = module_of(files, *settings_of(path, path), f"model.transformer_name_or_path={transformer}")
        module.check()
        module.base.check_files()
        ours = encodings(module)
    assert [name for name, one in expected.items() if not one.equal(ours[name])] == []
    assert module.base.components.repository == str(folder)
    assert module_of(files, f"model.vae_name_or_path={path}").base.components.repository == files.folder


def test_files_that_cannot_be_used_are_refused_in_one_line(files_of, tmp_path):
    files = files_of(FLUX)
    clip, t5 = (files.write(files.state(name), f"{name}.safetensors") for name in TEXTS[FLUX])
    again = files.write(files.state("text_encoder"), "again.safetensors")
    assert [*files.open([t5, clip])] == ["text_encoder_2", "text_encoder"]
    (tmp_path / "t5.gguf").write_bytes(b"GGUF")
    embedding = fp8(files.state("text_encoder_2"), {"shared.weight"}, "scale_weight")[0]
    cases = [
        ([clip, again], "text_encoder.safetensors and .*again.safetensors both contain text_encoder"),
        (str(files.folder), "is not a file. Name a repository by model.pretrained"),
        (str(tmp_path), r"is not a file. It contains again.* by .*model.text_encoder_name_or_path, .*\. Name a"),
        ("owner/name", "owner/name is not a file"),
        ("absent.safetensors", "text_encoder_name_or_path=absent.safetensors: the file does not exist"),
        (str(tmp_path / "t5.gguf"), "has llama.cpp's names, which are not read"),
        (files.write(embedding), "it has shared.weight in F8_E4M3, whose scales are not known"),
        (files.write(files.state("vae"), "vae.safetensors"), r"fits no component: as text_encoder it lacks"),
    ]
    for texts, message in cases:
        with pytest.raises(UserError, match=message) as error:
            files.open(texts)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="both contain text_encoder"):  # before any weights are read
        module_of(files, f"model.text_encoder_name_or_path=[{clip},{again}]").base.check()
