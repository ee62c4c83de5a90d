"""task=export by the command line: what is read back is what was trained."""

import base64
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import safetensors
import torch
from PIL import Image

from foundation.errors import UserError
from lightning_modules.adapters.targets import Ranks
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import LORA_FORMATS, modelspec_in, write
from report.images import Strip
from runs.run_folder import RunFolder
from tasks.export import title
from tests.support.combinations import first
from tests.support.commands import run_task
from tests.support.lora_files import layer_names, random_updates, relative
from tests.support.stock_pictures import load_stock
from tests.support.tiny_adapters import build

CASES = [("flux_kontext", "all-linear", True), ("qwen_image_edit", "default", False)]
ADAPTER = {"rank": 3, "alpha": 6.0, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def names(repositories):
    """Return the layer names of each model."""
    found = {}
    for model in ("flux_kontext", "qwen_image_edit"):
        found[model] = layer_names(model, load_stock(repositories[model]).transformer)
    return found


@pytest.fixture
def made(repositories, names, tmp_path):
    """Write a LoRA file as a run of ours leaves it, or as another program does; gives its path and updates."""

    def made(name, model="flux_kontext", format="diffusers", header=True, **settings):
        updates = random_updates(names[model], **settings)
        path = tmp_path / "outputs" / name / "lora" / "last" / "pytorch_lora_weights.safetensors"
        path = path if header else tmp_path / f"{name}.safetensors"
        facts = {"name": model, "pretrained_model_name_or_path": str(repositories[model]), "dtype": "float32"}
        own = {"adapter": ADAPTER | {"rank": settings.get("rank", 3)}, "model": facts, "step": 7, "base": facts["name"]}
        write(path, updates, own if header else {}, format=format, names=names[model])
        return path, updates

    return made


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Run task=export; gives the one file that it wrote, and what it said."""
    monkeypatch.chdir(tmp_path)
    number = iter(range(100))

    def export(*overrides):
        folder = tmp_path / f"out{next(number)}"
        text = run_task("export", *overrides, f"output_dir={folder}")
        [path] = folder.glob("*.safetensors")
        return path, text

    return export


def header_of(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["retouch"])


def read(path, names):
    return LoRAFile(path).read(names, "tiny")


def same(one, other, tolerance=1e-6):
    assert relative(one, other) < tolerance
    for name, update in one.items():
        magnitude = other[name].magnitude if name in other else None
        assert (update.magnitude is None) == (magnitude is None)
        if magnitude is not None:
            torch.testing.assert_close(magnitude, update.magnitude)


@pytest.mark.parametrize(("model", "targets", "dora"), first(1, CASES))
def test_every_format_is_read_back_as_what_was_exported(
    export, made, names, repositories, tmp_path, model, targets, dora
):
    """norm_out.linear has its halves swapped, to_q is a part of a fused layer; an export is what is exported next."""
    lora, updates = made("snow", model, targets=targets, dora=dora)
    base = [f"model={model}", f"model.pretrained_model_name_or_path={repositories[model]}"]
    for format, how in LORA_FORMATS.items():
        path, _ = export(f"lora={lora}", *base, f"format={format}")
        assert path.name == (how.file or f"snow_{format}.safetensors")
        same(updates, read(path, names[model]))
        assert str(tmp_path) not in json.dumps(header_of(path))
        if how.file is None:
            lora = path


def test_merge_is_the_weighted_sum_of_any_formats_ranks_and_layers(export, made, names):
    one, first = made("snow", targets="all-linear")
    other, second = made("rain", format="kohya", header=False, rank=5, targets="default", seed=1)
    path, _ = export(f"merge=[{one},{other}]", "merge_weights=[0.7,-0.4]", "format=comfyui")
    assert path.name == "snow+rain_comfyui.safetensors"
    expected = {name: update.scaled(0.7) for name, update in first.items()}
    for name, update in second.items():
        joined = [expected[name], update.scaled(-0.4)]
        expected[name] = replace(
            first[name], down=torch.cat([one.down for one in joined]), up=torch.cat([one.up for one in joined], dim=1)
        )
    same(expected, read(path, names["flux_kontext"]))
    header = header_of(path)
    assert header["export"] == {"format": "comfyui", "from": ["snow", "rain"], "weights": [0.7, -0.4]}
    assert header["model"]["name"] == "flux_kontext"
    assert "step" not in header
    assert "rank_schedule" not in header["adapter"]


def test_merge_of_a_lower_rank_in_half_precision_is_the_closest(export, made, names):
    """merge, rank, kohya and bfloat16 at once: the figures that are printed are those of the file."""
    one, first = made("snow", rank=40)
    other, second = made("rain", rank=40, seed=1)
    settings = [f"merge=[{one},{other}]", "rank=8", "format=kohya"]
    path, text = export(*settings, "export.dtype=bfloat16")
    exact, _ = export(f"merge=[{one},{other}]")
    whole = read(exact, names["flux_kontext"])
    written = read(path, names["flux_kontext"])
    assert path.name == "snow+rain_rank8_kohya.safetensors"
    discarded = total = 0.0
    for name in first:
        values = torch.linalg.svdvals(
            sum(part[name].up.double() @ part[name].down.double() for part in (first, second))
        )
        discarded, total = discarded + float(values[8:].square().sum()), total + float(values.square().sum())
    error = (discarded / total) ** 0.5
    assert relative(whole, written) == pytest.approx(error, rel=1e-3)
    assert f"the update changes by {error:.2%}" in text
    reduced, _ = export(*settings)
    assert f"BF16, {relative(read(reduced, names['flux_kontext']), written):.2%} off" in text
    assert set(LoRAFile(path).dtypes.values()) == {"BF16", "F32"}, "alphas are exact"
    assert {update.rank for update in written.values()} == {8}


def test_training_starts_from_an_export_with_the_same_update(export, trained, tiny):
    """alpha / rank in the header stays what was trained; alpha 8 for rank 4 there."""
    path, _ = export(f"lora={trained}", "format=kohya", "rank=2")
    assert header_of(path)["adapter"]["alpha"] == 4
    assert Ranks.of_file(LoRAFile(path)).scale == 2.0
    module = build(tiny, "lora", "adapter.rank=2", "adapter.alpha=3", f"adapter.init_from={path}")
    same(read(path, module.base.layer_names), module.adapter.deltas(module.transformer))


def test_other_programs_are_told_title_author_and_licence_with_a_published_thumbnail(export, made, repositories):
    """They last from one export to the next; each export of a file is the same, bit by bit."""
    lora, _ = made("snow")
    run = RunFolder(lora.parents[2])
    run.samples_of(7).mkdir(parents=True)
    for name, colour, private in (("0", "red", True), ("1", "blue", False)):
        image = Image.new("RGB", (300, 200), colour)
        Strip([image], image, None, "", private).write(run.samples_of(7) / f"{name}.png")
    settings = ["format=comfyui", "export.title=Snow everywhere", "export.author=me", "export.license=CC0 1.0"]
    path, _ = export(f"lora={lora}", *settings)
    entries = modelspec_in(LoRAFile(path).metadata)
    assert (entries["title"], entries["author"], entries["license"]) == ("Snow everywhere", "me", "CC0 1.0")
    assert entries["date"] == datetime.fromtimestamp(lora.stat().st_mtime, UTC).date().isoformat()
    picture = Image.open(io.BytesIO(base64.b64decode(entries["thumbnail"].partition(";base64,")[2])))
    assert picture.size == (256, 256)
    assert picture.convert("RGB").getpixel((9, 9))[2] > 200, "the red one is not published"
    preview = Image.open(path.with_suffix(".png"))
    assert (preview.size, preview.getpixel((9, 9))) == ((300, 200), (0, 0, 255)), "LoRA managers show it"
    assert LoRAFile(path).metadata["ss_base_model_version"] == "flux_kontext"
    assert export(f"lora={lora}", *settings)[0].read_bytes() == path.read_bytes()
    base = ["model=flux_kontext", f"model.pretrained_model_name_or_path={repositories['flux_kontext']}"]
    again, _ = export(f"lora={path}", "format=kohya", *base)
    kept = modelspec_in(LoRAFile(again).metadata)
    differ = {"title": "snow", "implementation": "kohya", "hash_sha256": kept["hash_sha256"]}
    assert kept == entries | differ


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("outputs/snow/lora/step-000200/pytorch_lora_weights.safetensors", "snow_step-000200"),
        ("outputs/sweep/3/lora/last/pytorch_lora_weights.safetensors", "sweep_3"),
        ("downloads/rain/pytorch_lora_weights.safetensors", "rain"),
        ("downloads/rain.v2.safetensors", "rain.v2"),
        ("out/snow_rank8_comfyui.safetensors", "snow_rank8"),
    ],
)
def test_an_exported_file_is_named_after_its_source(path, expected):
    assert title(Path(path)) == expected


def test_an_existing_file_is_replaced_only_if_configured(made, tmp_path):
    lora, _ = made("snow")
    request = ["export", f"lora={lora}", "format=peft", f"output_dir={tmp_path / 'out'}"]
    run_task(*request)
    before = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists: choose another output_dir"):
        run_task(*request, "rank=1")
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == before
    run_task(*request, "rank=1", "overwrite=true")
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora={snow}", "format=lycoris"], "format=lycoris: choose diffusers, comfyui, kohya, peft, onetrainer"),
        (["merge=[{snow},{qwen}]"], "does not fit"),
        (["merge=[{snow},{rain}]", "merge_weights=[1]"], "1 for 2 LoRAs. Give one for each"),
        (["merge=[{snow},{dora}]"], "is a DoRA, and only plain LoRAs can be added up"),
        (["lora={dora}", "rank=2"], "rank=2: this is a DoRA"),
        (["lora={snow}", "merge=[{snow},{rain}]"], "not lora and merge"),
        (["lora=[{snow},{rain}]"], "lora= writes one LoRA as it is"),
        ([], "task=export writes one LoRA by lora=RUN"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_one_line(refuses, made, overrides, message):
    files = {"snow": made("snow")[0], "rain": made("rain", seed=1)[0], "dora": made("dora", dora=True)[0]}
    files["qwen"] = made("qwen", "qwen_image_edit")[0]
    refuses("task=export", *(one.format(**files) for one in overrides), words=message, script="predict")
