"""Each component alone, and what is said of a repository that cannot be used."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from foundation.catalogue import CONFIGURATIONS, shipped_configuration
from foundation.errors import UserError
from foundation.hub import repository_file
from lightning_modules.pretrained.component_files import load_component
from lightning_modules.pretrained.repository import ASSETS, component_origin, read_index, stored_bytes
from tests.support.commands import ROOT, run_code
from tests.support.servers import hub


@pytest.mark.parametrize("name", ["text_encoder_2", "vae"])
def test_single_loaded_model_equals_the_pipelines(tiny, stock, name):
    own, theirs = load_component(str(tiny), name), getattr(stock, name)
    assert type(own) is type(theirs)
    assert not any(p.requires_grad for p in own.parameters())
    assert not own.training
    torch.testing.assert_close(own.state_dict(), theirs.state_dict(), rtol=0, atol=0)


# Class, a text and its published ids, the number of tokens, and the longest text.
ENGLISH, GERMAN = "translate English to German: That is good.", [13959, 1566, 12, 2968, 10, 466, 19, 207, 5, 1]
TOKENIZERS = {
    "clip": ("CLIPTokenizer", "a photo of a cat", [49406, 320, 1125, 539, 320, 2368, 49407], 49408, 77),
    "t5": ("T5TokenizerFast", ENGLISH, GERMAN, 32100, 512),
    "qwen": ("Qwen2TokenizerFast", "Hello world", [9707, 1879], 151669, 131072),
}


def test_shipped_configurations_find_all_that_has_no_weights():
    """Tokenizers and processors load offline; for those that do not ship, the index names the hub."""
    loaded, on_the_hub = {}, []
    for folder in CONFIGURATIONS.glob("*--*"):
        hub_id = folder.name.replace("--", "/")
        assert shipped_configuration(hub_id) == folder
        for name, entry in read_index(str(folder)).items():
            if name.startswith(("tokenizer", "text_processor", "processor", "scheduler")):
                found = component_origin(str(folder), name)
                if found == (hub_id, None, name):
                    with pytest.raises(UserError, match="cannot be reached"):
                        load_component(str(folder), name)
                    on_the_hub.append(folder.name.partition("--")[2])
                elif (*found, entry[1]) not in loaded:
                    loaded[*found, entry[1]] = load_component(str(folder), name)
    assert sorted(on_the_hub) == ["FLUX.2-dev", "Krea-2-Raw", "Qwen-Image-2.1", "flux-3-image-klein-base"]
    assert {Path(origin).name for origin, *_ in loaded} >= TOKENIZERS.keys()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_shipped_tokenizers_have_the_published_ids(name):
    cls, text, ids, tokens, longest = TOKENIZERS[name]
    tokenizer = getattr(transformers, cls).from_pretrained(ASSETS / "tokenizers" / name)
    assert tokenizer(text).input_ids == ids
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.padding_side) == (tokens, longest, "right")
    if name == "qwen":
        chat, more = [{"role": "user", "content": text}], {"tokenize": False, "add_generation_prompt": True}
        asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.apply_chat_template(chat, **more) == asked
        assert tokenizer.apply_chat_template(chat, enable_thinking=False, **more) == f"{asked}<think>\n\n</think>\n\n"
        assert tokenizer(f"<|image_pad|>{text}</think>").input_ids == [151655, *ids, 151668]


@pytest.mark.parametrize("folder", ["configurations", "tokenizers"])
def test_shipped_files_are_named_with_their_licence(folder):
    lines = (ASSETS / folder / "README.md").read_text(encoding="utf-8").splitlines()
    for path in filter(Path.is_dir, (ASSETS / folder).iterdir()):
        starts = f"| [{path.name.replace('--', '/')}](", f"| `{path.name}` |"
        [line] = [line for line in lines if line.startswith(starts)]
        assert re.search("Apache 2.0|MIT|FLUX (non-commercial|Kommunity)|Qwen Research|Krea 2 Community", line)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "neither a folder here nor the name of a repository"),
        ("black-forest-labs/FLUX.1-Kontext-dev", r"huggingface\.co cannot be reached: check the network"),
    ],
)
def test_repository_that_cannot_be_read_is_named(name, message):
    with pytest.raises(UserError, match=message):
        repository_file(name, "model_index.json")


def test_folder_without_an_index_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no model_index\.json"):
        read_index(str(tmp_path))


LOAD = """
import torch
from lightning_modules.pretrained.transformer import TransformerSource
source = TransformerSource("FluxTransformer2DModel", "owner/name", None, torch.float32, None, 0)
print(type(source.load(torch.device("cpu"))).__name__)
"""
PLAN = "import sys, train; sys.argv[0] = 'train.py'; train.main()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "code", "words"), [("transformer", LOAD, "FluxTransformer2DModel"), ("", PLAN, "fp8")]
)
def test_downloaded_repository_without_optional_files_needs_no_network(tiny, pairs, tmp_path, part, code, words):
    """HF_HUB_OFFLINE=1 avoids a minute of retries."""
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path)}
    with hub(tiny / part) as address:
        download = "import huggingface_hub; huggingface_hub.snapshot_download('owner/name')"
        run_code(download, HF_ENDPOINT=address, HF_HUB_OFFLINE="0", **environment)
    model = ["model.pretrained_model_name_or_path=owner/name", "model/quantization=fp8"]
    arguments = ["model=flux_kontext", *model, f"data.root={pairs}", "task=dry_run"]
    result = run_code(code, *arguments, cwd=tmp_path, HF_HUB_OFFLINE="1", **environment)
    assert words in result.stdout + result.stderr


BYTES = """
from huggingface_hub import snapshot_download
from lightning_modules.pretrained.repository import stored_bytes
before = stored_bytes("owner/name", None, "transformer")
snapshot_download("owner/name")
print(before, stored_bytes("owner/name", None, "transformer"), stored_bytes("owner/name", None, "vae"))
"""


@pytest.mark.slow
def test_bytes_of_a_component_are_those_of_its_files_stored_and_missing(tiny, tmp_path):
    files = [(tiny / name).glob("*.safetensors") for name in ("transformer", "vae")]
    transformer, vae = (sum(file.stat().st_size for file in own) for own in files)
    assert stored_bytes(str(tiny), None, "transformer") == (transformer, 0)
    assert stored_bytes("owner/name", None, "transformer") is None, "offline"
    with hub(tiny) as address:
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        result = run_code(BYTES, HF_ENDPOINT=address, **environment)
    assert result.stdout == f"{(transformer, transformer)} {(transformer, 0)} {(vae, 0)}\n"


@pytest.mark.slow
def test_gated_and_missing_repositories_are_told_apart_and_the_token_never_shown(tmp_path):
    code = (
        "import json\n"
        "from lightning_modules.pretrained.repository import read_index\n"
        "from foundation.errors import UserError\n"
        "lines = []\n"
        "for name in ('owner/gated', 'owner/missing'):\n"
        "    try: read_index(name)\n"
        "    except UserError as error: lines.append(str(error))\n"
        "print(json.dumps(lines))\n"
    )
    with hub(tmp_path) as address:
        environment = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_averysecrettoken", "HF_HOME": str(tmp_path)}
        result = run_code(code, HF_ENDPOINT=address, **environment)
    gated, missing = json.loads(result.stdout)
    assert "owner/gated is gated: accept its licence" in gated
    assert "log in" in gated
    assert "owner/missing is neither a folder here nor a repository" in missing
    assert "hf_averysecrettoken" not in result.stdout + result.stderr
    assert not any("averysecret" in path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file())
