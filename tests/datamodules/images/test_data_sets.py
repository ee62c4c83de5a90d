"""Data sets of Hugging Face: what their columns may hold, and what is wrong with them in one line."""

import json
import os
import socket

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features, Image, List, Value

from datamodules.images.samples import Root
from datamodules.images.sources import find_samples
from foundation.errors import UserError
from tests.support.stored import as_arrow, as_parquet, as_snapshot, data_set, picture, prompt

pytestmark = pytest.mark.usefixtures("data_set_cache")


def parquet(folder, **columns):
    """Write a plain table without the column metadata of `datasets`."""
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return folder / "x.parquet"


def stored(number):
    return {"bytes": picture(number), "path": None}


@pytest.mark.parametrize("kind", ["structs", "large bytes"])
def test_plain_tables_of_bytes(tmp_path, kind):
    cell = stored if kind == "structs" else picture
    columns = [pa.array([cell(number)], pa.large_binary() if kind == "large bytes" else None) for number in (0, 1)]
    root = parquet(tmp_path, before=columns[0], after=columns[1], caption=["x"])
    [sample] = find_samples([Root(root)]).samples
    assert sample.target.read_bytes() == picture(1)
    assert sample.controls[0].read_bytes() == picture(0)
    assert str(sample.target) == f"{root} row 0 after"


def test_paths_are_files_next_to_the_table(tmp_path):
    for number in (0, 1):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    root = parquet(tmp_path, source=["0.png", "0.png"], target=["1.png", "9.png"], text=["x", "y"])
    found = find_samples([Root(root)])
    assert [(one.controls, one.target) for one in found.samples] == [((tmp_path / "0.png",), tmp_path / "1.png")]
    assert found.incomplete == [f"data.root={root} row 1: {tmp_path}/9.png: No such file or directory"]


def test_lists_are_several_references_and_several_captions(tmp_path):
    features = Features({"refs": List(Image()), "image": Image(), "captions": List(Value("string"))})
    rows = {
        "refs": [[stored(0), stored(1)], [stored(2)], [], None, [stored(3), None]],
        "image": [stored(10 + number) for number in range(5)],
        "captions": [["a", "b "], ["c"], ["d"], ["e"], ["f"]],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    found = find_samples([Root(tmp_path / "saved")])
    assert [one.prompts for one in found.samples] == [("a", "b"), ("c",), ("d",), ("e",)]
    references = [[ref.read_bytes() for ref in one.controls] for one in found.samples]
    assert references == [[picture(0), picture(1)], [picture(2)], [], []]
    assert found.incomplete == [f"data.root={tmp_path}/saved row 4: refs is empty"]
    assert str(found.samples[0].controls[1]).endswith("row 0 refs[1]")


def test_numbered_columns_may_be_empty_but_for_the_first(tmp_path):
    root = parquet(
        tmp_path,
        input_image=[picture(0), picture(1), None],
        input_image_2=[picture(2), None, picture(3)],
        output_image=[picture(number + 10) for number in range(3)],
        prompt=list("abc"),
    )
    found = find_samples([Root(root)])
    assert [[ref.read_bytes() for ref in one.controls] for one in found.samples] == [
        [picture(0), picture(2)],
        [picture(1)],
    ]
    assert found.incomplete == [f"data.root={root} row 2: input_image is empty"]


def test_split_is_train_or_the_one_after_the_hash(tmp_path):
    root = as_snapshot(tmp_path / "mine")
    assert len(find_samples([Root(root)]).samples) == 4
    assert len(find_samples([Root(f"{root}#test")]).samples) == 1
    with pytest.raises(UserError, match="no split dev; its splits are train, test"):
        find_samples([Root(f"{root}#dev")])
    splits = datasets.DatasetDict({"a": data_set(1), "b": data_set(2)})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match=r"which split\?; its splits are a, b: name one after a #"):
        find_samples([Root(tmp_path / "splits")])
    assert len(find_samples([Root(f"{tmp_path}/splits#b")]).samples) == 2


def test_arrow_files_of_several_shards(tmp_path):
    data_set(5).save_to_disk(tmp_path / "saved", num_shards=3)
    found = find_samples([Root(tmp_path / "saved")])
    assert [one.key for one in found.samples] == [f"{row:06d}" for row in range(5)]
    assert [one.target.read_bytes() for one in found.samples] == [picture(10 + row) for row in range(5)]
    assert str(found.samples[4].target).endswith("row 4 edited_image")


def test_arrow_file_with_an_index_at_its_end(tmp_path):
    table = pa.table({"source": [picture(0)], "target": [picture(1)], "prompt": [prompt(0)]})
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    assert find_samples([Root(tmp_path / "x.arrow")]).samples[0].target.read_bytes() == picture(1)
    compressed = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema, options=compressed) as file:
        file.write_table(table)
    assert find_samples([Root(tmp_path / "x.arrow")]).samples[0].target.read_bytes() == picture(1)


@pytest.mark.parametrize(
    ("make", "name", "damaged"),
    [
        (as_parquet, "x.parquet", lambda content: content[:-300]),
        (as_parquet, "x.parquet", lambda content: b""),
        (as_arrow, "x.arrow", lambda content: b"no table\n" * 99),
    ],
)
def test_damaged_file_is_a_line(tmp_path, make, name, damaged):
    (tmp_path / name).write_bytes(damaged(make(tmp_path / "mine").read_bytes()))
    with pytest.raises(UserError, match=rf"data.root={tmp_path}/{name}: .*; repair it, or copy it again") as error:
        find_samples([Root(tmp_path / name)])
    assert "\n" not in str(error.value)


def test_arrow_file_that_is_cut_anywhere_is_no_shorter_data_set(tmp_path):
    table = pa.table({"source": [picture(0)] * 4, "target": [picture(1)] * 4, "prompt": list("abcd")})
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=1)
    content = (tmp_path / "x.arrow").read_bytes()
    assert len(find_samples([Root(tmp_path / "x.arrow")]).samples) == 4
    ends = [number for number in range(8, len(content), 8) if content[number : number + 4] == b"\xff" * 4]
    assert len(ends) >= 5
    for end in {*ends, *range(0, len(content), 1001)}:
        (tmp_path / "x.arrow").write_bytes(content[:end])
        with pytest.raises(UserError, match="repair it, or copy it again"):
            find_samples([Root(tmp_path / "x.arrow")])


def test_empty_table_is_a_line(tmp_path):
    with pytest.raises(UserError, match=f"data.root={tmp_path}/x.parquet: .*; repair it"):
        find_samples([Root(parquet(tmp_path, source=pa.array([], pa.binary())))])


def readme(files):
    configs = [{"config_name": "default", "data_files": files}]
    return lambda folder: (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


def script(folder):
    (folder / f"{folder.name}.py").write_text("raise SystemExit")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"download_checksums": {"http://h/x": {}}}}))


HARMLESS = {
    "address": readme("http://127.0.0.1:9/x.parquet"),
    "above": readme("../outside/x.parquet"),
    "pattern": readme([{"split": "train", "path": ["../*/*.parquet", "/etc/**"]}]),
    "hub": readme("hf://datasets/owner/name/x.parquet"),
    "script": script,
    "pattern as name": lambda folder: (folder / "data.parquet").rename(folder / "[d]*.parquet"),
}


@pytest.mark.parametrize("harm", HARMLESS.values(), ids=HARMLESS)
def test_only_the_files_of_a_local_data_set_are_read_and_nothing_is_asked_of_a_network(tmp_path, monkeypatch, harm):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **_: pytest.fail(f"a request to {place}"))
    (tmp_path / "outside").mkdir()
    data_set(3).to_parquet(tmp_path / "outside/x.parquet")
    (folder := tmp_path / "[stranger]").mkdir()
    data_set(2).to_parquet(folder / "data.parquet")
    harm(folder)
    assert len(find_samples([Root(folder)]).samples) == 2
    assert len(find_samples([Root(next(folder.glob("*.parquet")))]).samples) == 2


def renamed(name, change):
    def write(folder):
        data_set(1).save_to_disk(folder)
        content = json.loads((folder / "state.json").read_text())
        (folder / name).write_text(json.dumps(change(content, os.path.join(folder.parent, "outside/x.arrow"))))

    return write


def state(content, path):
    return content | {"_data_files": [{"filename": path}]}


HARMFUL = {
    "link": lambda folder: (folder / "data.parquet").symlink_to(folder.parent / "outside/x.parquet"),
    "linked folder": lambda folder: (folder / "data").symlink_to(folder.parent / "outside"),
    "address as name": lambda folder: data_set(1).to_parquet(folder / "a::http:b.parquet"),
    "saved, absolute": renamed("state.json", state),
    "saved, above": renamed("state.json", lambda content, _: state(content, "../outside/x.arrow")),
    "saved, splits": renamed("dataset_dict.json", lambda *_: {"splits": ["../outside"]}),
    "saved, types": renamed("dataset_dict.json", lambda *_: {"splits": [{"a": 1}]}),
    "saved, list": renamed("state.json", lambda *_: ["x"]),
}


@pytest.mark.parametrize("harm", HARMFUL.values(), ids=HARMFUL)
def test_a_file_outside_of_a_local_data_set_is_a_line(tmp_path, harm):
    (tmp_path / "outside").mkdir()
    data_set(3).to_parquet(tmp_path / "outside/x.parquet")
    as_arrow(tmp_path / "saved").rename(tmp_path / "outside/x.arrow")
    (tmp_path / "saved/state.json").rename(tmp_path / "outside/state.json")
    (folder := tmp_path / "stranger").mkdir()
    harm(folder)
    with pytest.raises(UserError, match=f"data.root={folder}") as error:
        find_samples([Root(folder)])
    assert "\n" not in str(error.value)


def test_a_cell_names_no_file_outside_and_a_snapshot_of_the_hub_links_to_its_blobs(tmp_path):
    folder, blob = tmp_path / "datasets--o--n/snapshots/1", tmp_path / "datasets--o--n/blobs/2"
    for one in (folder / "data", blob.parent):
        one.mkdir(parents=True)
    for path in (tmp_path / "out.png", blob):
        path.write_bytes(picture(0))
    (folder / "own.png").symlink_to(blob)
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    names = ["own.png", "link.png", "../../../out.png", str(tmp_path / "out.png"), "http://127.0.0.1:9/x.png"]
    cells = [{"bytes": None, "path": name} for name in names]
    pq.write_table(pa.table({"source": names, "target": cells, "text": names}), blob.with_name("3"))
    (folder / "data/train-00000-of-00001.parquet").symlink_to(blob.with_name("3"))
    found = find_samples([Root(folder)])
    assert [one.target for one in found.samples] == [folder / "own.png"]
    assert len(found.incomplete) == 4


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("hf://owner", "is hf://owner/name, or hf://owner/name@revision/config#split"),
        (
            "hf://datasets/owner/name@v1.0/config#test",
            "Couldn't reach .* see https://huggingface.co/datasets/owner/name$",
        ),
    ],
)
def test_data_set_of_the_hub_that_cannot_be_had_is_a_line(root, message):
    with pytest.raises(UserError, match=message):
        find_samples([Root(root)])
