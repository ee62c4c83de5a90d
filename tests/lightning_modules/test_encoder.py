"""The encoder: pixels and prompts to latents and embeddings."""

import torch
from hydra.utils import instantiate

from datamodules.encoding import EncodeRequest
from tests.support.commands import compose


def test_all_captions_are_encoded_in_the_encoders_own_precision(tiny, pairs, monkeypatch):
    """Mixed trainer precision does not matter; otherwise a cache would depend on the command that built it."""
    settings = [f"model.pretrained_model_name_or_path={tiny}", f"data.root={pairs}", "data=pairs"]
    cfg = compose("train", *settings)
    module, data = instantiate(cfg.model, adapter=None), instantiate(cfg.data)
    data.configure_for(module)
    data.scan()
    [raw] = data.pixels(data.training, slice(1))
    mixed = {}
    encode = module.encode_prompt

    def noting(parts, prompt, images):
        mixed[prompt] = torch.is_autocast_enabled("cpu")
        return encode(parts, prompt, images)

    monkeypatch.setattr(module, "encode_prompt", noting)
    captions = (*raw.prompts, "a second one", "a third one")
    with torch.autocast("cpu", torch.bfloat16):
        _, prompts = module.encoder.to_cache(EncodeRequest(raw, "id", [], captions, (), 0))
    assert len(prompts) == 3
    assert mixed == dict.fromkeys([*captions, ""], False)
