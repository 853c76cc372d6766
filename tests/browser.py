"""Headless Chromium for tests of pages and notebooks: the system's own, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
STEP_MS = 90_000
"""What a step may take on a busy machine: a program may have to be compiled."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    # Chromium's own sandbox refuses to start as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page whose console errors and requests are kept."""

    def __init__(self, browser: Any, width: int = 1280, *, dark: bool = False) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page.set_default_timeout(STEP_MS)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))


def assert_opens_offline(browser: Any, path: Path, charts: int) -> None:
    """Open a file as a double click does: it draws so many charts, asks for nothing else, and logs no error.

    It does so in light and dark, and nothing hangs over the edge of a window 1280 or 800 pixels wide.
    """
    for width, dark in ((1280, False), (800, True)):
        seen = Watched(browser, width, dark=dark)
        seen.page.goto(path.as_uri())
        seen.page.wait_for_function(f"() => document.querySelectorAll('.chart svg').length === {charts}")
        assert seen.requests == [path.as_uri()]
        assert seen.errors == []
        over = seen.page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"{over} pixels wider than the window of {width}"
        seen.page.close()


@contextmanager
def marimo_server(notebooks: Path, environment: dict[str, str], log: Path) -> Iterator[str]:
    """`marimo run` of a folder on a free port; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "marimo", "-y", "run", str(notebooks), "--headless", "--port", str(port)]
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            env=os.environ | environment | {"MARIMO_SKIP_UPDATE_CHECK": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + STEP_MS / 1000
        while not _answers(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
