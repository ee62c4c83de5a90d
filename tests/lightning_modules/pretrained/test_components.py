"""The cache of encoded prompts."""

import torch

from lightning_modules.encoder import PromptCache
from lightning_modules.timing import StageTimer

CPU = torch.device("cpu")


def test_prompts_are_encoded_once_and_singly_and_the_oldest_forgotten():
    calls = []

    def encode(prompt, images):
        calls.append(prompt)
        return {"prompt_embeds": torch.tensor([float(len(prompt))])}

    memory = PromptCache(encode, StageTimer(), kept=2)
    batch = memory(["a", "bb", "a"], [[], [], []], CPU)
    assert batch["prompt_embeds"].tolist() == [[1.0], [2.0], [1.0]]
    assert calls == ["a", "bb"]
    memory(["ccc"], [[]], CPU)  # "bb" was used longest ago
    memory(["a"], [[]], CPU)
    assert calls == ["a", "bb", "ccc"]
    memory(["bb"], [[]], CPU)
    assert calls == ["a", "bb", "ccc", "bb"]


def test_prompts_of_a_prediction_are_all_kept():
    memory = PromptCache(lambda prompt, images: {"x": torch.zeros(1)}, StageTimer(), kept=2)
    prompts = [str(i) for i in range(10)]
    memory.keep([(prompt, ()) for prompt in prompts], lambda paths: [])
    memory.encode = None  # the encoders are gone
    assert memory(prompts, [[]] * 10, CPU)["x"].shape == (10, 1)
    assert all(memory.seconds(prompt, []) >= 0 for prompt in prompts)


def test_prompt_is_known_by_the_images_that_its_encoder_sees():
    calls = []

    def encode(prompt, images):
        calls.append((prompt, len(images)))
        length = 2 + len(calls)
        return {"prompt_embeds": torch.full((length, 3), float(len(calls))), "prompt_embeds_mask": torch.ones(length)}

    memory = PromptCache(encode, StageTimer())
    image = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    batch = memory(["a", "a", "a", "a"], [[image], [image + 1], [image.clone()], [image, image]], CPU)
    assert calls == [("a", 1), ("a", 1), ("a", 2)]
    assert batch["prompt_embeds"][:, 0, 0].tolist() == [1, 2, 1, 3]
    assert batch["prompt_embeds_mask"].sum(1).tolist() == [3, 4, 3, 5]
    assert batch["prompt_embeds"][0, 3:].abs().sum() == 0
