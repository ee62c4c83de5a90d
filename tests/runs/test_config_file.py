"""A run's config.yaml: signed, bounded, and harmless when it comes from elsewhere."""

import os

import pytest
from omegaconf import OmegaConf

from foundation.errors import UserError
from runs.config_file import RESOLVERS, is_own, read_config, resolvable, write_config
from tests.support.commands import ROOT
from tests.support.harm import BILLION_LAUGHS


@pytest.fixture
def config(tmp_path):
    write_config(tmp_path / "config.yaml", {"a": {"b": 1e-5, "c": "${a.b}", "d": "${oc.env:HOME}", "e": "2024-01-01"}})
    return tmp_path / "config.yaml"


def test_a_users_settings_are_trusted_in_any_folder_until_changed(config, tmp_path, monkeypatch):
    assert is_own(config.read_bytes())
    copy = tmp_path / "elsewhere.yaml"
    copy.write_bytes(config.read_bytes())
    assert is_own(copy.read_bytes())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert not is_own(config.read_bytes())
    monkeypatch.undo()
    for change in (b"x: 1\n" + config.read_bytes(), config.read_bytes().replace(b"1.0e-05", b"2.0e-05")):
        copy.write_bytes(change)
        assert not is_own(copy.read_bytes())
    copy.write_bytes(config.read_bytes() + b"x: 1\n")
    assert not is_own(copy.read_bytes())


def test_nobody_else_reads_the_key_and_without_a_home_nothing_is_own(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_config(config, {})
    [key] = (tmp_path / "state").rglob("key")
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    write_config(config, {"a": 1})
    assert read_config(config) == {"a": 1}
    assert not is_own(config.read_bytes())


def test_a_damaged_key_is_replaced(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "retouch").mkdir()
    (tmp_path / "retouch/key").touch()
    assert not is_own(config.read_bytes())
    write_config(config, {"a": 1})
    assert is_own(config.read_bytes())


def test_content_is_omegaconfs(config):
    assert read_config(config) == OmegaConf.to_container(OmegaConf.load(config))
    assert OmegaConf.create(resolvable(config)).a.d == os.environ["HOME"], "an own file says what the command line said"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(BILLION_LAUGHS, id="aliases"),
        pytest.param("a: &a {x: 1}\nb: {<<: [*a, *a]}", id="merged aliases"),
        pytest.param("a: " + "[" * 40_000, id="depth"),
        pytest.param("a: " + "x" * 2**21, id="size"),
        pytest.param("a: !!python/object/apply:os.system [id]", id="object"),
        pytest.param("a: !!set {x}", id="set"),
        pytest.param("a: " + ":".join(["1"] * 1000), id="number of base 60"),
        pytest.param("a: 0x" + "F" * 20_000, id="number of 20,000 digits"),
        pytest.param("a: !!binary aGk=", id="binary"),
        pytest.param("- 1", id="list"),
        pytest.param("null", id="nothing"),
        pytest.param("[a]: 1", id="a list as key"),
        pytest.param("a: 1\0", id="NUL"),
    ],
)
def test_invalid_settings_files_are_one_line(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml is damaged .*; repair or remove it") as error:
        read_config(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="it is a pipe"):
        read_config(tmp_path / "config.yaml")


def test_settings_of_another_machine_read_no_environment_and_become_no_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    path, doubled = tmp_path / "config.yaml", {f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(40)}
    texts = {
        "env": "${oc.env:SECRET_TOKEN}",
        "escaped": "\\\\${oc.env:SECRET_TOKEN}",
        "spaced": "${ oc.env : SECRET_TOKEN}",
        "inner": "${when:x,1,${oc.env:SECRET_TOKEN}}",
        "built": "${oc.${name}:SECRET_TOKEN}",
        "key": "${a[${oc.env:SECRET_TOKEN}]}",
        "mapping": "${oc.select:zz,{_target_:os.system}}",
        "long": "${when:x," + "a," * 1000 + "b}",
        "decode": "${oc.decode:'{_target_: os.system}'}",
    }
    path.write_text(OmegaConf.to_yaml({**texts, "name": "env", "x": 1, **doubled, "a40": "x", "plain": "${x}"}))
    cfg = OmegaConf.create(resolvable(path))
    assert all(OmegaConf.select(cfg, key) == text.replace("${", "$ {") for key, text in texts.items())
    assert cfg.a0 == "$ {a1}$ {a1}", "else 2 ** 40 letters"
    assert cfg.plain == 1


def test_resolvers_of_conf_are_known():
    texts = "".join(path.read_text() for path in (ROOT / "conf").rglob("*.yaml"))
    used = {part.partition(":")[0] for part in texts.split("${")[1:] if ":" in part.partition("}")[0]}
    assert used - {"hydra"} <= {*RESOLVERS}
    assert all(map(OmegaConf.has_resolver, RESOLVERS))
