"""The page answers its own browser only, reads no file by a path of a request, and shows every text as text."""

import inspect
import re
import sys
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from extras.page import tryout
from extras.page.answers import HERE
from extras.page.app import create_app, serve
from extras.page.jobs import Jobs
from foundation.errors import UserError
from tests.extras.page.conftest import BASE, SECRET, TOKEN, write_run
from tests.support.pictures import make_pairs

PATHS = (
    "../secret.txt",
    "..",
    "first/../../secret.txt",
    "/etc/passwd",
    "....//secret.txt",
    "..%2fsecret.txt",
    "\0",
    "C:\\x",
)


def test_only_an_address_with_the_token_opens_the_page_and_its_cookie_keeps_it_open(outputs):
    client = TestClient(create_app(TOKEN, outputs=outputs), BASE, follow_redirects=False)
    for address in ("/runs", "/runs?token=wrong", "/runs?token=", "/static?file=page.css", "/image"):
        assert client.get(address).status_code == 403
    answer = client.get("/runs", params={"token": TOKEN})
    assert 'content="0; url=/runs"' in answer.text, "the token leaves the address"
    assert all(word in answer.headers["set-cookie"] for word in ("HttpOnly", "SameSite=strict"))
    assert TOKEN not in answer.headers["set-cookie"]
    assert client.get("/runs").status_code == 200
    client.cookies.clear()
    client.cookies.set("retouch-7860", "wrong")
    assert client.get("/runs").status_code == 403


def test_another_name_of_this_machine_is_refused_unless_the_page_is_for_others(client, outputs):
    """A foreign site could let its own name point to 127.0.0.1."""
    assert client.get("/runs", headers={"host": "evil.example:7860"}).status_code == 403
    for name in ("localhost.evil.example", "evil-localhost", "x.localhost.", "x.localhost@evil.example", ""):
        assert client.get("/runs", headers={"host": name}).status_code == 403, name
    for host in ("localhost:9000", "127.0.0.1:7860", "[::1]:7860", "mine.localhost:7860"):
        answer = client.get("/runs", params={"token": TOKEN}, headers={"host": host})
        assert answer.headers["set-cookie"]
    open_page = TestClient(create_app(TOKEN, local=False, outputs=outputs), "http://gpu.lan:7860")
    assert open_page.get("/runs", params={"token": TOKEN}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_no_other_site_can_ask_for_changes(client, outputs, headers):
    form = {"run": "first", "request": "stop"}
    assert client.post("/ask", data=form, headers=headers).status_code == 403
    # The page itself is heard: the run has ended.
    answer = client.post(
        "/ask", data=form, headers={"origin": BASE, "sec-fetch-site": "same-origin", "hx-request": "true"}
    )
    assert (answer.status_code, "does not run" in answer.text) == (400, True)


def test_no_parameter_of_any_address_reads_a_file_of_that_path(client, outputs):
    names = ("run", "sample", "part", "file", "first", "data", "image", "lora", "name")
    good = {"run": "first", "sample": "4/one", "part": "1", "hub.push": "\0"}  # refused: no dry runs
    for route in client.app.app.routes:
        for name in names:
            for path in (*PATHS, str(outputs.parent / "secret.txt")):
                if "POST" in route.methods:
                    answer = client.post(route.path, data={**good, name: path})
                else:
                    answer = client.get(route.path, params={**good, name: path})
                assert answer.status_code < 500, (route.path, name, path)
                assert SECRET not in answer.text
                assert "root:x:" not in answer.text
                if name in ("run", "sample", "part") and route.path == "/image":
                    assert answer.status_code == 404


NASTY = {
    "NUL": "\0",
    "terminal": "\x1b[2J\x08",
    "half a letter": "\udcff\ud800",
    "separators": "\u2028\u202e\ufeff",
    "5,000 letters": "x" * 5000,
    "300 letters": "x" * 300,
    "5,000 digits": "9" * 5000,
    "deep": "[" * 1000,
    "user": "~nosuchuser/x",
    "above": "..",
    "negative": "-1",
    "not a number": "nan",
    "infinite": "1e999",
    "circle": "${trainer.max_steps}",
    "environment": "${oc.env:HOME}",
    "lines": "\r\n\r\n=\r\n",
    "nothing": "",
}
NAMES = re.compile(r"""(?:get|getlist|asked|form|values)\W{1,3}"([\w./]+)"|name="([\w./]+)\"""")


def everything(outputs):
    """Return a field of each name that the page's sources read, with a value that is good for some route."""
    sources = [path.read_text() for path in HERE.iterdir() if path.suffix in (".py", ".html")]
    fields = dict.fromkeys(next(filter(None, found.groups())) for text in sources for found in NAMES.finditer(text))
    return dict.fromkeys(fields, "1") | {
        **{"run": "first", "which": "last", "request": "stop", "key": "0" * 16, "file": "page.css", "image": ""},
        **{"set": "", "sample": "00", "part": "target", "show": "all", "task": "inspect", "role": "target"},
        **{"data.root": str(outputs.parent / "pairs"), "path": str(outputs), "name": "renamed", "more": "", "when": ""},
        **{
            "output_dir": f"{outputs}/new",
            "model": "embedded",
            "folder": "f",
            "lora": "",
            "weight": "",
            "captioner": "",
        },
    }


def names_of(route, names):
    """Return those of the names that the file of a route's handler contains, and one that none does."""
    handler = inspect.getclosurevars(route.endpoint).nonlocals.get("handler", route.endpoint)
    source = inspect.getsource(inspect.getmodule(handler))
    return [*(name for name in names if f'"{name}"' in source), "unknown"]


@pytest.mark.slow
@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_no_value_of_any_field_of_any_route_is_a_mistake_of_ours(client, outputs, monkeypatch, value):
    """Neither by itself among good ones, nor twice, nor as a file."""
    monkeypatch.setattr(Jobs, "start", lambda *_: None)
    monkeypatch.setattr(tryout, "COMMAND", [sys.executable, "-c", "import sys; sys.stdin.read()"])
    make_pairs(outputs.parent / "pairs", [(32, 32)])
    hx, good = {"hx-request": "true"}, everything(outputs)
    answer = client.post("/data/open", data={"data.root": good["data.root"]}, headers=hx)
    good["set"] = answer.headers["hx-redirect"].partition("=")[2]
    for route in client.app.app.routes:
        own = {name: good.get(name, "") for name in names_of(route, good)}
        asked = [[*(own | {name: value}).items()] for name in own]
        for fields in [*asked, [(name, value) for name in [*own][:5] for _ in range(2)]]:
            if not (outputs / "first").exists():  # renamed or deleted
                write_run(outputs / "first", 4, "make it snow")
            text = urlencode(fields, errors="surrogatepass")
            if "GET" in route.methods:
                answer = client.get(f"{route.path}?{text}", headers=hx)
            else:
                kind = {"content-type": "application/x-www-form-urlencoded"}
                answer = client.post(route.path, content=text, headers={**hx, **kind})
            assert answer.status_code < 500, (route.path, fields, answer.text)
            assert answer.status_code < 400 or answer.text.count("\n") == 0, (route.path, answer.text)
        if "POST" in route.methods:
            answer = client.post(route.path, files=dict.fromkeys(own, ("x.png", b"x")), headers=hx)
            assert 300 < answer.status_code < 500, (route.path, answer.text)


def test_texts_of_runs_are_shown_as_text(client, outputs):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>'\""
    write_run(outputs / "<b>bold", 2, evil, model_name=evil)
    for address in ("/runs", "/run?run=%3Cb%3Ebold", "/compare?run=first&run=%3Cb%3Ebold", f"/run?run={evil}"):
        text = client.get(address).text
        assert "alert(1)" in text or "bold" in text
        assert not any(word in text for word in ("<script>alert", "<img src=x", "<b>bold"))
    policy = client.get("/runs").headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy


def test_a_report_is_shown_in_a_page_without_cookies_and_other_addresses(client, outputs):
    (outputs / "first/report.html").write_text("<script>fetch('/runs')</script>")
    policy = client.get("/report?run=first").headers["content-security-policy"]
    assert "sandbox allow-scripts" in policy
    assert "connect-src" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("headers", [{"host": "[::1"}, {"host": "[127.0.0.1]"}, {"origin": "http://[::"}])
def test_names_that_are_no_address_are_refused(client, headers):
    answer = client.post("/ask", data={"run": "first", "request": "stop"}, headers=headers)
    assert (answer.status_code, "Refused" in answer.text) == (400, True)
    assert answer.headers["content-security-policy"]


def test_an_empty_token_is_not_one(monkeypatch):
    """TOKEN may be unset in token=$TOKEN."""
    import studio

    given = []
    monkeypatch.setattr("extras.page.app.serve", lambda *values: given.append(values))
    monkeypatch.setattr(sys, "argv", ["studio.py", "token=", "open=false"])
    studio.main()
    assert len(given[0][2]) > 20


@pytest.mark.parametrize("port", [99999, "abc"])
def test_an_invalid_port_is_one_line(port):
    with pytest.raises(UserError, match=f"port={port}: "):
        serve("127.0.0.1", port, TOKEN, opens=False)
