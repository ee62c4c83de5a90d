"""Data sets of the hub, from a server that answers as it does."""

import pytest

from tests.support.commands import run_code
from tests.support.servers import REVISION, hub
from tests.support.stored import as_snapshot, picture

pytestmark = pytest.mark.slow
# Prints for each root how many samples it has, its first prompt and the size of its first target, or the error.
CODE = """
import sys
from foundation.errors import UserError
from datamodules.images.samples import Root
from datamodules.images.sources import find_samples

for root in sys.argv[1:]:
    try:
        samples = find_samples([Root(root)]).samples
        print(len(samples), samples[0].prompts[0], len(samples[0].target.read_bytes()))
    except UserError as error:
        print(error)
"""


@pytest.fixture
def ask(tmp_path):
    """Return the lines about roots printed by a new process, which reads the server's address at import."""

    def ask(address, *roots):
        environment = {"HF_ENDPOINT": address or "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home")}
        done = run_code(CODE, *roots, HF_HUB_OFFLINE="0" if address else "1", **environment)
        assert "Traceback" not in done.stderr
        assert "%|" not in done.stderr, "no progress bars"
        return done.stdout.splitlines()

    return ask


def test_splits_revisions_and_configurations_are_downloaded_once(ask, tmp_path):
    roots = [f"hf://owner/name{root}" for root in ("", "#test", f"@{REVISION}/default#test")]
    with hub(as_snapshot(tmp_path / "served")) as address:
        *found, none, config = ask(address, *roots, "hf://owner/none", "hf://owner/name/other")
    assert found == [f"{count} make it number 0 {len(picture(10))}" for count in (4, 1, 1)]
    assert none.startswith("data.root=hf://owner/none: Dataset 'owner/none' doesn't exist on the Hub")
    assert none.endswith("see https://huggingface.co/datasets/owner/none")
    assert "'other' not found. Available: ['default']" in config
    assert ask(None, roots[0]) == found[:1], "read without a network"
