"""Attacks on the page in a real browser: nothing that a stranger wrote runs, whoever serves or sends it."""

import html
import json
import os
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import quote

import psutil
import pytest
from omegaconf import OmegaConf

from tests.extras.page.browsing import browser_page, chromium, enter, studio_at
from tests.extras.page.conftest import write_run
from tests.support.commands import ROOT
from tests.support.harm import payload, typed

# Seconds in which a command that an attack starts would show: the page waits one before its dry run.
PATIENCE = 5.0


@contextmanager
def site(pages):
    """Temporarily serve a stranger's pages; yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(pages.get(self.path.partition("?")[0], "").encode())

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def started():
    """Return the commands of train.py and predict.py that the page has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any(word.endswith(("train.py", "predict.py")) for word in process.cmdline()):
                found.append(process.cmdline()[2:])
    return found


def assert_nothing_runs(marker):
    """Watch for the seconds in which an attack would have started a command."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert not started()
        assert not marker.exists()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def address(place):
    """Serve a page over a good run and runs from elsewhere, each with another attack in its files."""
    marker = place / "marker"
    write_run(place / "outputs/good", 4, "make it snow")
    choices = {"hydra": {"runtime": {"choices": {"model": "embedded"}}}}
    write_run(place / "outputs/foreign", 4, "x", data={"root": payload(marker)}, **choices)
    write_run(place / "outputs/listed", 4, "x", data={"root": [{"path": payload(marker)}]}, **choices)
    decoded = "${oc.decode:" + json.dumps(typed(marker)) + "}"
    write_run(place / "outputs/decoded", 4, "x", data={"root": decoded}, **choices)
    upwards = {"model": os.path.relpath(place / "outputs/traversal/evil", ROOT / "conf/model")}
    evil = write_run(place / "outputs/traversal", 4, "x", hydra={"runtime": {"choices": upwards}})
    of_model = {"defaults": ["/model/embedded@_here_", "_self_"], "revision": payload(marker)}
    OmegaConf.save(OmegaConf.create(of_model), evil.path / "evil.yaml")
    with studio_at(place) as address:
        yield address


@pytest.fixture(scope="module")
def link(address, place):
    """Return the link by which a command ran in earlier versions: the form was filled from it, and tried itself."""
    base = address.partition("/?")[0]
    return f"{base}/start?more=" + quote(f"data.root={typed(place / 'marker')}", safe="")


@pytest.fixture(autouse=True)
def untouched(place):
    """Begin each attack without the trace of another one."""
    yield
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(word.endswith("train.py") for word in process.cmdline()):
                process.kill()
    time.sleep(0.5)
    (place / "marker").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another site", "another port of this host"])
def test_no_page_of_others_runs_a_command(address, link, place, host):
    """Neither by a link, frame, window or form, nor from a null origin."""
    value = html.escape(f"data.root={typed(place / 'marker')}")
    form = f'<form action="{address.partition("/?")[0]}/plan" method="post"><input name="more" value="{value}"></form>'
    click = "<button id=a onclick='document.forms[0].submit()'>go</button>"
    framed = html.escape(form + "<script>document.forms[0].submit()</script>")
    pages = {
        "link": f'<a id=a href="{link}">cats</a>',
        "frame": f'<button id=a>go</button><iframe src="{link}"></iframe>',
        "window": f"<button id=a onclick='window.open(\"{link}\")'>go</button>",
        "form": form + click,
        "get": form.replace('"post"', '"get"').replace("/plan", "/start") + click,
        "null": f'<a id=a>go</a><iframe sandbox="allow-forms allow-scripts" srcdoc="{framed}"></iframe>',
    }
    with site({f"/{way}": text for way, text in pages.items()}) as port, chromium() as page:
        enter(page, address)
        page.get_by_role("link", name="good").wait_for()
        for way in pages:
            other = page.context.new_page()
            other.goto(f"http://{host}:{port}/{way}")
            other.locator("#a").click()
        assert_nothing_runs(place / "marker")


@pytest.mark.slow
def test_a_page_whose_name_points_here_runs_no_command(address, link, place):
    base = address.partition("/?")[0]
    with chromium(args=["--host-resolver-rules=MAP evil.example 127.0.0.1"]) as page:
        enter(page, address)
        page.goto(link.replace("127.0.0.1", "evil.example"))
        assert "Refused" in page.content()
        page.goto(address.replace("127.0.0.1", "evil.example"))
        assert "Refused" in page.content()
        assert base.replace("127.0.0.1", "evil.example") in page.url
        assert_nothing_runs(place / "marker")


@pytest.mark.slow
def test_a_report_from_elsewhere_runs_no_command(address, link, place):
    (place / "outputs/foreign/report.html").write_text(f"<script>location = {json.dumps(link)}</script>")
    with chromium() as page:
        enter(page, address)
        page.goto(f"{address.partition('/?')[0]}/run?run=foreign")
        page.get_by_role("link", name="report.html").click()
        assert_nothing_runs(place / "marker")


@pytest.mark.slow
def test_runs_from_elsewhere_are_shown_and_run_no_command_again(address, place):
    """Nor are their data sets scanned."""
    base, names = address.partition("/?")[0], ["foreign", "listed", "decoded", "traversal"]
    with chromium() as page:
        enter(page, address)
        for name in names:
            page.goto(f"{base}/run?run={name}")
            page.get_by_role("heading", name=name).wait_for()
            page.get_by_role("link", name="run again").click()
            page.wait_for_timeout(2000)  # in which the page would try its settings
        assert_nothing_runs(place / "marker")
        for name in names:
            page.goto(f"{base}/data")
            page.locator("select[name=run]").select_option(name)
            page.get_by_role("button", name="open its data").click()
            answered = "() => Boolean(document.getElementById('message').innerText || location.search)"
            while not page.evaluate(answered):
                time.sleep(0.1)
        assert_nothing_runs(place / "marker")


@pytest.mark.slow
def test_the_page_itself_still_does_what_it_is_asked(address):
    """The attacks fail for their origin, not because nothing works."""
    with browser_page(address) as page:
        page.get_by_role("link", name="Start", exact=True).click()
        page.locator("#command").wait_for()
        assert "python train.py" in page.locator("#command").inner_text()
