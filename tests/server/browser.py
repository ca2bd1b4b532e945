"""A real browser, if this machine has one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from server.live_server import TIMEOUT

NAMES = ("chromium", "google-chrome")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the tests where there is none; `make browser` installs it on Debian, as root."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (see `make browser`)")
    milliseconds = 1000 * TIMEOUT  # by default, 5 s are enough for what is expected of a page
    expect.set_options(timeout=milliseconds)
    with sync_playwright() as playwright:
        # Without a sandbox, because root has none; what is loaded comes from our own server.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=milliseconds
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, expected: str | None = None, **options: object
) -> Iterator[Page]:
    """A page in a context of its own. Whatever it complains about, apart from lines that hold
    `expected`, fails the test; and so does a request to another place than its server."""
    server = "/".join(url.split("/")[:3]) + "/"
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 1000}} | options)
    context.set_default_timeout(1000 * TIMEOUT)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("console", lambda m: complaints.append(m.text) if m.type != "log" else None)
    page.on(
        "request",
        lambda r: complaints.append(r.url) if not r.url.startswith((server, "data:")) else None,
    )
    try:
        page.goto(url)
        yield page
        assert [line for line in complaints if expected is None or expected not in line] == []
    finally:
        context.close()
