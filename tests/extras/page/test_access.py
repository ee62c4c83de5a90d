"""The page answers its own browser only, reads no file by a path of a request, and shows every text as text."""

import sys

import pytest
from starlette.testclient import TestClient

from extras.page.app import create_app, serve
from foundation.errors import UserError
from tests.extras.page.conftest import BASE, SECRET, TOKEN, write_run

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
    for host in ("localhost:9000", "127.0.0.1:7860", "[::1]:7860"):
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
