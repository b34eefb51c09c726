"""Opens every page of the built documentation in headless Chromium: `python tests/docs/browse.py build/site`.

Each page is opened in two widths, a desktop's and a telephone's. A page fails if the browser logs an error (a script,
a picture or a style sheet that is missing), if it asks another host for anything, or if it can be scrolled sideways.
Screenshots are left next to the site, in build/site-screenshots. `make docs-browser` runs it. It needs Debian's
packages chromium and chromium-driver; chromedriver speaks JSON over HTTP, so no Python package is needed.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = (1280, 400)
HEIGHT, TALLEST = 900, 2600  # of a window, and of a screenshot
# Else Chromium looks up hosts of its vendor, and its log fills up with what the network refused.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
# Elements that reach past the right edge and lie in no box that scrolls by itself.
TOO_WIDE = """
const clips = (e) => /auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX);
const scrolls = (e) => e && e !== document.body && (clips(e) || scrolls(e.parentElement));
const root = document.documentElement;
if (root.scrollWidth <= root.clientWidth) return [];
const wide = [...document.querySelectorAll('.md-content *')].filter(
    (e) => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e.parentElement));
return [`scrolls sideways to ${root.scrollWidth} px`,
        ...wide.slice(0, 3).map((e) => `too wide: <${e.tagName}> ${e.textContent.trim().slice(0, 60)}`)];
"""
FOREIGN = (
    "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !n.startsWith(location.origin))"
)


class Browser:
    """A session with chromedriver (W3C WebDriver)."""

    def __init__(self, address: str, profile: str) -> None:
        self._address = address
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": [*FLAGS, f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._post("/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{answer['sessionId']}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._address + path, json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"chromedriver refused {path}: {error.read().decode()[:500]}") from None

    def devtools(self, command: str, **arguments: Any) -> Any:
        return self._post(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": arguments})

    def resize(self, width: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def errors(self) -> list[str]:
        """What the page has logged as an error since the last call."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, width: int) -> bytes:
        height = min(self.run("return document.documentElement.scrollHeight"), TALLEST)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        request = urllib.request.Request(self._address + self._session, method="DELETE")
        urllib.request.urlopen(request, timeout=600).close()


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            session = Browser(f"http://127.0.0.1:{port}", profile)
            yield session
            session.close()
        finally:
            driver.terminate()
            driver.wait()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError("chromedriver did not start within a minute")


def look(session: Browser, url: str, width: int) -> tuple[bytes, list[str]]:
    """A picture of a page in this width, and what is wrong with it."""
    session.resize(width)
    session.open(url)
    picture = session.screenshot(width)  # takes a while, in which scripts may fail too
    foreign = [f"asks another host: {name}" for name in session.run(FOREIGN)]
    return picture, [*session.errors(), *foreign, *session.run(TOO_WIDE)]


def main(site: Path) -> int:
    if shutil.which("chromedriver") is None:
        print("browse.py: chromedriver must be installed; apt-get install chromium chromium-driver")
        return 1
    shots = site.parent / f"{site.name}-screenshots"
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir()
    pages, wrong = sorted(site.rglob("*.html")), 0
    with served(site) as address, browser() as session:
        for page in pages:
            name = page.relative_to(site).as_posix()
            for width in WIDTHS:
                picture, faults = look(session, f"{address}/{name}", width)
                (shots / f"{name.replace('/', '-')}-{width}.png").write_bytes(picture)
                wrong += bool(faults)
                for fault in faults:
                    print(f"{name} at {width}: {fault}")
    print(f"{len(pages)} pages in {len(WIDTHS)} widths, {wrong} with faults; screenshots in {shots}")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
