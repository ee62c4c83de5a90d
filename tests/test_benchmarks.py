"""Benchmarks that need a GPU, or many samples, run at a tiny size."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxKontextPipeline
from hydra.utils import instantiate
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import faults, launches, peer, training_speed
from benchmarks.fault_kinds import judging
from benchmarks.fault_kinds.workshop import Reference
from benchmarks.gpu import goals
from benchmarks.gpu.parts import PARTS, Row, chosen
from datamodules.shards.cache import Cache
from foundation.catalogue import shipped_configuration
from lightning_modules.blocks import blocks
from report.tables import read_metrics
from tests.support.caches import flip
from tests.support.commands import ROOT, run_code
from tests.support.commands import compose as whole_config
from tests.support.latents import fill

pytestmark = pytest.mark.slow
GPU_CHECK = "import sys; from benchmarks import gpu_check; sys.argv[0] = 'gpu_check.py'; "


PAGES = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# As `python` and `python -m` find modules: not next to the folder of a file, and in no PYTHONPATH.
HELP = """
import contextlib, io, os, runpy, shlex, sys, torch, diffusers, lightning.pytorch, hydra
for line in sys.stdin.read().splitlines():
    words = shlex.split(line)
    if os.fork() == 0:
        module = words[1] == "-m"
        sys.argv = [*words[2 if module else 1:], "--help"]
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(sys.argv[0]))
        status = 1
        with contextlib.redirect_stdout(io.StringIO()) as text:
            try:
                (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                status = end.code or 0
            except BaseException as error:
                print(f"{line}: {error!r}", file=sys.stderr)
        os._exit(status or (0 if "usage: " in text.getvalue() else 3))
    if (status := os.waitstatus_to_exitcode(os.wait()[1])):
        print(f"{status}: {line}")
"""


def commands_of_pages():
    """Return each command of a benchmark that a page names, without arguments that stand for others."""
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    named = {found for text in texts for found in re.findall(r"python (?:-m )?benchmarks[/.][^`#;\n]*", text)}
    # Words in capitals stand for values: without them a command is only its script.
    commands = (one.partition(" --")[0] if re.search(r" [A-Z]+\b", one) else one for one in named)
    return sorted({" ".join(one.split()) for one in commands})


def test_every_command_of_a_page_runs_as_written_after_the_installation():
    commands = commands_of_pages()
    assert {one.split()[1] for one in commands} >= {"benchmarks/full_size.py", "benchmarks/lora_files.py", "-m"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code, lines = [sys.executable, "-c", HELP], "\n".join(commands)
    pipes = {"input": lines, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(code, cwd=ROOT, env=environment, check=True, **pipes)
    assert done.stdout == "", done.stderr


# Billions of a transformer's parameters, its blocks of all kinds, and its heads.
WIDTHS = {
    "flux_kontext": (11.9, 19 + 38, 24),
    "flux_dev": (11.9, 19 + 38, 24),
    "flux2_klein_4b": (3.9, 5 + 20, 24),
    "flux2_klein_9b": (9.1, 8 + 24, 32),
    "flux2_dev": (32.2, 8 + 48, 48),
    "flux3_klein": (5.5, 15 + 28, 24),
    "qwen_image": (20.4, 60, 24),
    "qwen_image_edit": (20.4, 60, 24),
    "qwen_image_edit_plus": (20.4, 60, 24),
    "qwen_image_2_1": (7.1, 32, 32),
    "z_image": (6.15, 34, 30),
    "longcat_image_edit": (6.3, 10 + 20, 24),
    "krea2": (12.8, 28, 48),
    "krea2_edit": (12.8, 28, 48),
}


def test_each_model_is_measured_by_a_benchmark():
    names = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert names - {"_base", "embedded", "flux_kontext_fp4", "flux_kontext_fp8"} == WIDTHS.keys()


@pytest.mark.parametrize("model", WIDTHS)
def test_a_benchmark_measures_the_model_that_it_names(tmp_path, model):
    from benchmarks.memory import compose, write_shallow

    write_shallow(model, None, str(tmp_path))
    name = whole_config("predict", f"model={model}").model.pretrained_model_name_or_path
    for part in ("transformer", "vae"):
        own = (shipped_configuration(name) / part / "config.json").read_text()
        assert json.loads((tmp_path / part / "config.json").read_text()) == json.loads(own)
    transformer = instantiate(compose(model, str(tmp_path), "bfloat16").model, _convert_="all").base.source.meta
    billions, depth, heads = WIDTHS[model]
    assert sum(one.numel() for one in transformer.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
    assert len(blocks(transformer)) == depth
    assert transformer.config.get("num_attention_heads", transformer.config.get("n_heads")) == heads


def test_goals_are_judged_on_their_cards_only_and_where_their_rows_are():
    def facts(row, seconds):
        return {row.name: {"facts": {"seconds_per_step": seconds}}}

    def lines(device, records):
        return goals.lines({"device": device, "tiny": False}, records)

    compiled, peer = (Row("flux_kontext", "bf16", 1024, "full", how=how) for how in ("compiled", "peer"))
    one = facts(compiled, 1.0)
    assert lines("NVIDIA H100 80GB HBM3", one) == [f"met: 1, at most 1.1 s: {compiled.name[6:]}"]
    slower = facts(compiled, 1.2) | facts(peer, 1.8)
    assert [line.partition(":")[0] for line in lines("NVIDIA H200", slower)] == ["not met", "not met"]
    assert [line.partition(",")[0] for line in lines("RTX 4090", slower)] == ["another card: 1.2", "another card: 1.5"]


def test_kernels_are_counted_and_views_are_not():
    with FakeTensorMode(), launches.Launches() as counted:
        x, weight, bias = (torch.empty(shape, device="cuda") for shape in ((1, 4, 6), (8, 6), (8,)))
        y = torch.nn.functional.linear(x, weight, bias)
        y.view(2, 2, 8).transpose(0, 1)[0]
        (y * 2).contiguous().to(torch.bfloat16)
    assert counted.counts == {"aten::addmm": 1, "aten::mul": 1, "aten::_to_copy": 1}


def test_recomputing_masks_and_8_bits_launch_more_kernels(tmp_path):
    launches.write_shallow("flux_kontext", 1, str(tmp_path))

    def count(checkpointing="none", adapter="lora", precision="bf16"):
        settings = [*launches.PRECISIONS[precision], f"adapter={adapter}"]
        [found] = launches.counts("flux_kontext", str(tmp_path), settings, [(256, checkpointing)])
        return found.total()

    plain = count()
    assert count(checkpointing="full") > 1.3 * plain
    assert count(adapter="tlora") > 1.02 * plain
    assert count(precision="fp8") > 1.05 * plain


def read(output):
    return json.loads(output.read_text()), output.with_suffix(".md").read_text()


def test_gpu_check_runs_on_a_cpu_with_nothing_installed_but_what_it_names(tmp_path):
    """Run all parts, train.py included, with the rows that cover each value of each column."""
    output = tmp_path / "results" / "tiny.json"
    named = "torch", "diffusers", "peft", "bitsandbytes", "optimum-quanto", "lightning", "hydra-core", "obstore"
    named = *named, "rapidfuzz"
    assert all(name in (ROOT / "benchmarks" / "gpu_check.py").read_text() for name in named)
    few = f"from tests.support.installed import only; only(*{named}); "
    hidden = "from importlib.util import find_spec; assert not find_spec('webdataset'); assert find_spec('torch'); "
    code = few + hidden + GPU_CHECK + "sys.exit(gpu_check.main())"
    needed, seen = set(), set()
    for name, part in reversed(PARTS.items()):
        values = set(enumerate(part.row or ()))
        if part.row is None or values - seen:
            needed.add(name)
            seen |= values
    run_code(code, "--tiny", "--minutes", "60", "--output", str(output), "--only", *needed)
    result, table = read(output)
    assert list(result["results"]) == list(chosen(list(needed), tiny=True))
    assert all(record["status"] == "passed" and record["facts"] for record in result["results"].values())
    rows = [record["facts"] for record in result["results"].values() if "row" in record]
    assert all(("estimated_gb" in facts) == (facts["how"] != "peer") for facts in rows)
    assert all(facts["tflops"] >= 0 for facts in rows)
    assert all(f"| {name.removeprefix('speed ')}" in table for name in result["results"])


def raises(bench, facts):
    facts["known"] = 1
    raise RuntimeError("CUDA error: an illegal memory access\nmore")


def dies(bench, facts):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench, facts):
    time.sleep(600)


def finds(bench, facts):
    return ["this is wrong", "so is that"]


def sabotage():
    changed = {"offload_blocks": dies, "ortho_tlora": raises, "bases": hangs, "kernels": finds}
    for name, function in changed.items():
        PARTS[name] = PARTS[name]._replace(run=f"{__name__}:{function.__name__}")
    PARTS["bases"] = PARTS["bases"]._replace(limit=1)


def test_gpu_check_continues_after_failures_crashes_and_hangs_and_names_them(start, tmp_path):
    output = tmp_path / "results.json"
    names = ["bases", "scaled_mm", "offload_blocks", "ortho_tlora", "kernels"]
    arguments = ["--tiny", "--output", str(output), "--only", *names]
    text, _ = start("benchmarks.gpu_check", *arguments, before=sabotage).communicate(timeout=120)
    result, table = read(output)
    assert list(result["results"]) == names
    statuses = {name: record["status"] for name, record in result["results"].items()}
    assert statuses == dict.fromkeys(names, "failed") | {"scaled_mm": "passed"}
    assert result["results"]["ortho_tlora"]["facts"] == {"known": 1}
    assert "Traceback" in result["results"]["ortho_tlora"]["traceback"]
    lines = [
        "bases: not done after 1 s",
        "offload_blocks: its process ended with status -11, see the log",
        "ortho_tlora: RuntimeError: CUDA error: an illegal memory access",
        "kernels: this is wrong",
        "kernels: so is that",
    ]
    assert text.splitlines()[-6:] == ["failed:", *lines]
    assert all(f"- {line}\n" in table for line in lines)


@pytest.fixture
def whole(tmp_path):
    """Return the output of a run, as a judge reads it."""
    run = tmp_path / "whole" / "run"
    for name in ("lora/last", "checkpoints"):
        (run / name).mkdir(parents=True)
    (run / "lora/last" / judging.WEIGHTS).write_bytes(b"weights")
    (run / "metrics.csv").write_text("step,loss,grad_norm,lr,seconds\n1,0.5,1.0,0.1,3\n2,0.25,1.0,0.1,4\n")
    (run / "validation.csv").write_text("step,val_loss\n2,0.5\n")
    (run / "finished.json").write_text('{"step": 2}')
    loops = {"fit_loop": {"epoch_loop.state_dict": {"_batches_that_stepped": 1}}}
    content = {"state_dict": {"a": torch.ones(3)}, "global_step": 2, "loops": loops}
    torch.save(content, run / "checkpoints" / "last.ckpt")
    return run


def change_tensor(path):
    content = torch.load(path, weights_only=True)
    content["state_dict"]["a"][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    torch.save(content, path)


def drop_row(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


CHANGES = {
    f"lora/last/{judging.WEIGHTS}": flip,
    "validation.csv": flip,
    "checkpoints/last.ckpt": change_tensor,
    "metrics.csv": drop_row,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_bit_of_a_run_is_bad_and_its_folder_is_kept(whole, tmp_path, monkeypatch, name):
    shop = SimpleNamespace(folder=tmp_path, reference=lambda kind: Reference(whole.parent, 1.0, []))

    def fault(round, change=lambda path: None):
        shutil.copytree(whole, round.folder / "run")
        change(round.folder / "run" / name)
        round.same_run("train")

    monkeypatch.setitem(faults.FAULTS, "nothing", fault)
    monkeypatch.setitem(faults.FAULTS, "changed", lambda round: fault(round, CHANGES[name]))
    good, bad = (faults.play(kind, 1, shop) for kind in ("nothing", "changed"))
    assert (good.outcome, good.why) == (faults.SAME, "")
    assert bad.outcome == faults.BAD
    assert name.rpartition("/")[2] in bad.why
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["changed-1"]


def test_a_step_that_was_saved_and_is_made_again_is_bad(whole, tmp_path):
    shop = SimpleNamespace(folder=tmp_path, reference=lambda kind: Reference(whole.parent, 1.0, []))
    round = faults.Round("again", 1, tmp_path / "again", shop)
    saved = round.saved(whole)
    assert len(saved) == 2
    round.kept(saved, whole)
    table = whole / "metrics.csv"
    table.write_text(table.read_text().replace(",4\n", ",5\n"))
    with pytest.raises(judging.BadError, match="the 2 steps that were saved were made again"):
        round.kept(saved, whole)


@pytest.mark.parametrize("sample", [0, 5])
def test_a_cache_that_lacks_a_sample_or_has_another_is_found(tmp_path, sample):
    def build(name, *first):
        cache = Cache(tmp_path / name / "fingerprint", {"dtype": "bfloat16"})
        for rank, number in enumerate(first):
            cache.seal(fill(cache, 3, rank=rank, first=number))
        cache.merge()
        return tmp_path / name

    one = build("one", 0, 3)
    assert judging.cache_differences(one, build("otherwise divided", 3, 0)) == []
    assert judging.cache_differences(one, build("lacks", 0)) != []
    [tar] = [path for path in (one / "fingerprint").glob("*.tar") if path.name.startswith("latents-00001")]
    content = bytearray(tar.read_bytes())
    content[2000 + sample] ^= 1
    tar.write_bytes(content)
    with pytest.raises(judging.BadError, match=r"is not what"):
        judging.cache_content(one / "fingerprint")


def test_a_command_may_end_in_one_line_and_in_nothing_else(tmp_path):
    def ended(text, status, allowed=(0, 1)):
        round = faults.Round("ends", 1, tmp_path / f"ends-{len(list(tmp_path.iterdir()))}", SimpleNamespace())
        command = SimpleNamespace(wait=lambda seconds: status, text=text, log=tmp_path / "log-0.txt")
        round.ended(command, allowed)
        return round.lines

    assert ended("done\n", 0) == []
    assert ended("note\nerror: cannot read a/b.tar: delete it\n", 1) == ["error: cannot read a/b.tar: delete it"]
    for text, status in (
        ("Traceback (most recent call last):\n", 1),
        ("error: a\nerror: b\n", 1),
        ("stopped\n", 1),
        ("done\n", None),
        ("", -9),
    ):
        with pytest.raises(judging.BadError):
            ended(text, status)
    with pytest.raises(judging.BadError, match="status 1"):
        ended("error: a\n", 1, (0,))


def test_the_table_of_faults_is_that_of_the_results():
    results = [faults.Result(**one) for one in json.loads(faults.RESULTS.read_text())["results"]]
    assert faults.table(results) in (ROOT / "benchmarks" / "README.md").read_text()


def test_rounds_of_faults_end_as_they_should(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--rounds", "3"]
    output = tmp_path / "faults.json"
    more = ["--seed", "2000", "--folder", str(tmp_path / "campaign"), "--write", str(output)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    results = json.loads(output.read_text())["results"]
    assert len({one["fault"] for one in results}) > 2
    assert {one["outcome"] for one in results} <= {faults.SAME, faults.LINE}


STEPS = """import sys, torch
weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1.0)
for _ in range(int(sys.argv[1])):
    weight.sum().backward()
    optimizer.step()
"""


def test_a_peers_script_is_timed_unchanged_and_its_pipeline_reads_77_tokens(tmp_path):
    (tmp_path / "script.py").write_text(STEPS)
    command = ["-m", "benchmarks.peer", "--launch", str(tmp_path / "steps.csv"), str(tmp_path / "script.py"), "6"]
    measured = training_speed.measure(command, tmp_path / "steps.csv", peer.WARM_UP)
    assert measured.seconds > measured.first > 0
    assert [row["step"] for row in read_metrics(tmp_path / "steps.csv")] == list("123456")
    peer.write_pipeline(tmp_path / "pipeline", None)
    pipeline = FluxKontextPipeline.from_pretrained(tmp_path / "pipeline", dtype=torch.float32)
    tokens = pipeline.tokenizer("a circle", padding="max_length", max_length=77, return_tensors="pt").input_ids
    assert pipeline.text_encoder(tokens).pooler_output.shape == (1, pipeline.transformer.config.pooled_projection_dim)
