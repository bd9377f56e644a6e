"""A page of a real browser that is watched: what it logs, whom it asks, and whether everyone can use it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = os.environ.get("HETEXP_CHROMIUM") or shutil.which("chromium")
"""The browser; `None` where there is none."""
TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)
EXPECTED = r"status of (404|422)"
"""What Chromium itself logs for answers that the page shows to the person."""

COMPLAINTS = (Path(__file__).parent / "browser" / "complaints.js").read_text(encoding="utf-8")


@dataclass
class Watched:
    """A page and what it did that it should not."""

    page: Page
    wrong: list[str]

    def complaints(self) -> list[str]:
        """Return what keeps someone from using what is shown now."""
        return list(self.page.evaluate(COMPLAINTS))


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """Start a browser for one test: it starts processes whenever it likes, and ends them when it ends."""
    flags = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def watched_page(browser: Browser, url: str, allowed: str | None = None, **options: Any) -> Iterator[Watched]:
    """Open a page in a context of its own; at the end it must have logged no error and asked nobody else.

    Args:
        allowed: pattern of errors that the test brings about.
        options: of the context, such as `viewport`.
    """
    home = urlsplit(url).netloc
    known = re.compile("|".join([EXPECTED, *([allowed] if allowed else [])]))
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    watched = Watched(page, [])

    def console(message: Any) -> None:
        if message.type in ("error", "warning") and not known.search(message.text):
            watched.wrong.append(f"{message.type}: {message.text}")

    def request(asked: Any) -> None:
        if urlsplit(asked.url).netloc not in (home, "") and not asked.url.startswith("data:"):
            watched.wrong.append(f"asked {asked.url}")

    page.on("console", console)
    page.on("pageerror", lambda error: watched.wrong.append(f"uncaught: {error}"))
    page.on("request", request)
    page.on("websocket", request)
    try:
        page.goto(url)
        yield watched
        assert watched.wrong == [], watched.wrong
    finally:
        context.close()
