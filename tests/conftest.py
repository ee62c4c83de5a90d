"""Tiny real pipelines and real photographs, offline."""

import gc
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same suite, whatever the machine has
os.environ["OMP_NUM_THREADS"] = "1"  # workers on few cores
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"  # not a person's
os.environ["COLUMNS"] = "250"  # long paths stay on one line
os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/retouch-tests-{os.getuid()}"  # not the key of a person

import pytest
import torch
from hypothesis import settings
from lightning import seed_everything
from PIL import Image

from foundation.notes import notes
from tests.support.commands import COUNTS, Outcome, run_here, short
from tests.support.composition import keep_compositions
from tests.support.gallery import Folders, Gallery, Runs, once, shared_folder
from tests.support.pictures import make_pairs, photograph
from tests.support.servers import bucket, moto_server, s3  # noqa: F401
from tests.support.several_runs import start_two
from tests.support.tiny_pipelines import MODELS
from tests.support.warm import Warm, connect, serve

torch.set_num_threads(1)
gc.set_threshold(100_000)  # a tenth of the seconds went into collecting garbage that is not there
keep_compositions()
settings.register_profile("same examples every time", derandomize=True, deadline=None)
settings.load_profile("same examples every time")


# Files whose tests take long: they come first, that none is alone at the end.
LONG = (
    "test_benchmarks",
    "test_distributed",
    "test_peers",
    "test_cache_builds",
    "test_shares",
    "test_loading_memory",
    "test_photos_model",
    "test_compilation",
    "test_windows",
    "test_triton_products",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["commands"] = serve()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        connect(config.workerinput["commands"])


def pytest_sessionfinish(session):
    """Send a worker's count of commands to the first process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["commands"] = dict(COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add a worker's count of commands."""
    COUNTS.update(getattr(node, "workeroutput", {}).get("commands", {}))


def pytest_terminal_summary(terminalreporter):
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(COUNTS.items())) or "none"
    terminalreporter.write_line(f"whole commands: {words}")


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_frozen():
    """Freeze all existing objects, so that the garbage collection after each run skips them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Seed the random numbers, so that a test draws the same ones alone and in the suite."""
    seed_everything(0, verbose=False)


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    """Change into a temporary folder, which receives default outputs."""
    os.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """Return a folder that all workers share."""
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def repositories(shared) -> dict[str, Path]:
    """Return, by model=, tiny float32 pipelines on disk, built on first use."""
    return Folders(shared / "tiny", list(MODELS), lambda name, folder: MODELS[name].build(folder))


@pytest.fixture(scope="session")
def tiny(repositories) -> Path:
    """Return the folder of a tiny float32 FluxKontextPipeline."""
    return repositories["flux_kontext"]


@pytest.fixture
def stock(tiny):
    """Return the tiny pipeline as loaded by diffusers."""
    from diffusers import FluxKontextPipeline

    pipeline = FluxKontextPipeline.from_pretrained(tiny)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def pairs(shared) -> Path:
    """Eight pairs of 32x32."""
    return once(shared / "pairs", lambda folder: make_pairs(folder, [(32, 32)] * 8))


@pytest.fixture(scope="session")
def runs(shared, tiny, pairs) -> Runs:
    """Return runs by their settings, each made once and only read."""
    return Runs(shared / "runs", tiny, pairs)


@pytest.fixture(scope="session")
def gallery(runs) -> Gallery:
    """Return runs by name, each made once and only read."""
    return Gallery(runs)


@pytest.fixture
def data_set_cache(monkeypatch, tmp_path):
    """Give the library datasets a cache of this test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def copied(tmp_path):
    """Copy a past run, to change it: to a folder of this test."""
    return lambda past, name="run": Path(shutil.copytree(past.folder, tmp_path / name))


@pytest.fixture(autouse=True)
def own_notes():
    """Show notes again that an earlier test has shown."""
    notes.begin_run(True, "")


@pytest.fixture
def run():
    """Run train.py or predict.py with overrides, in this process but by its real command line."""

    def run(script: str, *overrides: str, ok: bool = True) -> Outcome:
        outcome = run_here(script, *overrides)
        assert not ok or outcome.status == 0, outcome.text
        return outcome

    return run


@pytest.fixture
def start():
    """Start train.py or predict.py as a process of its own, in a session of its own."""
    processes = []

    def start(script: str, *overrides: str, **more: Any) -> Warm:
        processes.append(Warm(script, *overrides, **more))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


@pytest.fixture
def in_two_processes(start):
    """The status and the text of two processes such as torchrun starts, for several runs one after the other."""

    def in_two_processes(runs):
        ranks = start_two(start, runs)
        texts = [rank.communicate(timeout=300)[0] for rank in ranks]
        return max(rank.returncode for rank in ranks), "".join(texts)

    return in_two_processes


def build_dataset(model: str, root: Path) -> None:
    """Write six samples, one of them of another size, their captions of different lengths."""
    tiny = MODELS[model]
    targets, controls = (root / "training_images", root / "control_images") if tiny.controls else (root, root)
    for folder in (targets, controls):
        folder.mkdir(parents=True, exist_ok=True)
    for i in range(6):
        name = ("astronaut", "chelsea", "coffee")[i % 3]
        photograph(name, *((48, 48) if i == 5 else (64, 32))).save(targets / f"{i}.png")
        (targets / f"{i}.txt").write_text("make it snow" + " and rain" * i)
        for k, (width, height) in enumerate(tiny.controls[: 1 if i == 4 else None]):
            image = photograph(("rocket", "retina")[k], width, height).transpose(Image.Transpose(i % 2))
            image.save(controls / (f"{i}.png" if k == 0 else f"{i}_control_{k}.png"))


@pytest.fixture(scope="session")
def datasets(shared) -> dict[str, Path]:
    """Return, by model=, data sets of `build_dataset`, built on first use."""
    return Folders(shared / "datasets", list(MODELS), build_dataset)


@pytest.fixture
def arguments(repositories, datasets):
    """Return overrides of a short quiet run."""

    def arguments(model, output, steps, *more, shown=False):
        common = short(repositories[model], datasets[model], output, steps, MODELS[model].data, shown)
        return [f"model={model}", "model.dtype=float32", *common, *MODELS[model].settings, *more]

    return arguments


@pytest.fixture
def trained(gallery):
    """Return the folder of a run whose LoRA visibly changes images."""
    return gallery("lora").folder


@pytest.fixture
def photo(tmp_path):
    """Return the path of an image of 48x32."""
    photograph("coffee", 48, 32).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def refuses(tiny, pairs, tmp_path):
    """Assert that train.py refuses settings, or predict.py a request, in one line with these words, and return it.

    The settings of a good run of the tiny FLUX Kontext are given; no folder may be left.
    """

    def refuses(*overrides: str, words: str | Sequence[str] = (), script: str = "train", root: Path = pairs) -> str:
        output = tmp_path / "refused"
        given = [f"output_dir={output}", "trainer.accelerator=cpu"]
        if script == "train":
            given = [one for one in short(tiny, root, output, 2, shown=True) if one != "logger=none"]
        line = run_here(script, *given, *overrides).error
        for word in [words] if isinstance(words, str) else words:
            assert word in line
        assert not output.exists(), "a command that did not start leaves no folder"
        return line

    return refuses


@pytest.fixture
def watch(monkeypatch):
    """Watch each step of the following runs, including all callbacks at its end."""
    from lightning.pytorch import Trainer

    from lightning_modules.edit_module import EditModule
    from tests.support.watch import Watch

    watch, init, end = Watch(), Trainer.__init__, EditModule.on_train_batch_end

    def with_watch(self, *args, callbacks=(), **kwargs):
        init(self, *args, callbacks=[*callbacks, watch], **kwargs)

    def then_end(self, *args):
        end(self, *args)
        watch.end()

    monkeypatch.setattr(Trainer, "__init__", with_watch)
    monkeypatch.setattr(EditModule, "on_train_batch_end", then_end)
    return watch
