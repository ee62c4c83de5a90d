"""Full fine-tuning: what trains, what is written, and that it goes on where it stopped."""

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from diffusers import FluxKontextPipeline
from hydra.utils import instantiate

from foundation.errors import UserError
from tests.lightning_modules.families.test_flux import raw_batch
from tests.support.commands import compose, short
from tests.support.objectives import losses
from tests.support.other_adapters import short_of

FULL = ["adapter=full", "adapter.text_encoders=true", "model.max_sequence_length=16"]
RUN = [*FULL, "data.batch_size=2", "optimizer=muon", "scheduler=constant", "data.caption_dropout_rate=0.5"]
TRAINED = ("transformer", "text_encoder", "text_encoder_2")


def built(folder, *overrides):
    settings = compose("train", f"model.pretrained_model_name_or_path={folder}", *overrides)
    return instantiate(settings.model, _convert_="all")


def weights(folder):
    """Read all tensors of a pipeline's folder, by component and name."""
    return {
        f"{path.parent.name}.{name}": tensor
        for path in sorted(folder.glob("*/*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def every_byte(folder):
    """Read all bytes of the pipeline except its card, which has the run's name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def whole(runs):
    """Return the pipeline that a run of four steps leaves."""
    return runs(4, *RUN).folder / "model/last"


def test_resumed_full_fine_tune_is_bitwise_the_uninterrupted_one(run, runs, copied, whole, tiny, pairs):
    folder = copied(runs(2, *RUN))
    half = every_byte(folder / "model/last")
    run("train", *short_of(short(tiny, pairs, folder, 4)), *RUN, "ckpt_path=last")
    assert every_byte(folder / "model/last") == every_byte(whole)
    assert half != every_byte(whole)


def test_trained_components_are_written_and_the_rest_is_the_bases(run, whole, tiny, pairs, tmp_path):
    written, base = weights(whole), weights(tiny)
    assert written.keys() == base.keys()
    same = {name for name in base if torch.equal(written[name], base[name])}
    assert {name.partition(".")[0] for name in same} >= {"vae"}
    still = {name for name in same if name.startswith(TRAINED)}
    # Words and places that no prompt has.
    assert all("embed" in name or "shared" in name for name in still), still
    assert every_byte(whole / "tokenizer") == every_byte(tiny / "tokenizer")
    state = torch.load(whole.parents[1] / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in state.items():
        assert torch.equal(tensor, written[name.removeprefix("text_encoders.")]), name
    # It is a base like any other.
    image = pairs / "control_images/00.png"
    asked = [f"image={image}", "prompt=mirror picture 0", "num_inference_steps=2", "seed=3"]
    run("predict", f"model.pretrained_model_name_or_path={whole}", *asked, f"output_dir={tmp_path / 'pictures'}")
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1
    FluxKontextPipeline.from_pretrained(whole)


def test_gradients_are_the_pipelines_through_its_text_encoders(tiny, stock, tmp_path):
    """The reference is diffusers' own parts, which encode prompts with gradients; cached prompts are not used."""
    module = instantiate(compose("train", f"model.pretrained_model_name_or_path={tiny}", *FULL).model)
    module.configure_model()
    raw = raw_batch(module, tmp_path)
    batch = module.encoder(raw)
    batch.prompt = {name: torch.full_like(tensor, 7.0) for name, tensor in batch.prompt.items()}
    loss = losses(module, module.encoder.refresh_prompt_embeds(batch)).mean()
    loss.backward()
    parts = module.trained.parts

    for part in TRAINED:
        getattr(stock, part).requires_grad_(True)
    embeds, pooled, _ = stock.encode_prompt(raw.prompts, None, max_sequence_length=16)
    batch.prompt = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    module.transformer = stock.transformer
    expected = losses(module, batch).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert parts.keys() == set(TRAINED)
    for name, part in parts.items():
        theirs = dict(getattr(stock, name).named_parameters())
        ours = {parameter: one.grad for parameter, one in part.named_parameters()}
        assert ours.keys() == theirs.keys()
        for parameter, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[parameter].grad, rtol=1e-4, atol=1e-6)
        assert any(gradient is not None and gradient.abs().max() > 0 for gradient in ours.values())


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("flux_kontext", ["model/quantization=fp8"], "must not be quantized"),
        ("flux_kontext", ["model.devices.text_encoder=cpu"], "Leave out model.devices.text_encoder"),
        ("flux_kontext", ["model.offload.blocks=2", "model.gradient_checkpointing=true"], "Leave out model.offload"),
        ("flux2_klein_4b", [], "stay frozen"),
        ("qwen_image_edit", [], "stay frozen"),
    ],
)
def test_base_that_cannot_train_is_refused_before_loading(repositories, model, more, words):
    with pytest.raises(UserError, match=words):
        built(repositories[model], f"model={model}", *FULL[:2], *more).check()
    module = built(repositories["flux_kontext"], *FULL[:2])
    with pytest.raises(UserError, match="adapter=full needs the whole model in each process"):
        module.adapter.check(module.base, sharded=True, text_sees_images=False)
    with pytest.raises(UserError, match=r"needs the prompts: give data\.root in place of data\.shards"):
        module.execution.check_data(SimpleNamespace(training=SimpleNamespace(captions=())))
