"""The page with the real server and real trainings, from the choice of two emulated cards to the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")
pytest.importorskip("fastapi", reason="needs the dashboard: pip install -e '.[dashboard]'")

from browser_page import CHROMIUM, started_browser, watched_page
from playwright.sync_api import Browser, Page, expect

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(400),
]
GROUPS = {"Model": "mlp", "Data": "synthetic", "Balancing policy": "equal"}
SMALL = {
    "logger": "none",
    "trainer.log_every": "2",
    "data.num_samples": "256",
    "data.num_test_samples": "8",
    "hardware.threads_per_rank": "1",
}
SLOW_MS = 180_000
"""Longest wait for a real training on a machine that other tests use, too."""


@pytest.fixture
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture
def url(tmp_path: Path, hetexp_home: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "hetexp.cli", "dashboard", "--port", "0"]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "HETEXP_HOME": str(hetexp_home)}
    log = tmp_path / "dashboard.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        found = process.stdout.readline().strip()
        assert found.startswith("http://"), log.read_text()
        yield found + "/"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def _choose(page: Page, **settings: str) -> None:
    """Fill in the form: two emulated cards, a small model, and `settings` by their keys.

    The page keeps what was chosen before.
    """
    page.get_by_role("link", name="New training").click()
    expect(page.get_by_label("Model")).to_be_visible()
    if not page.get_by_role("button", name="Remove").count():
        for card in ("RTX 3090", "Arc A770"):
            page.get_by_label("Not in this machine").select_option(label=card)
            page.get_by_role("button", name="Add").first.click()
        for label, option in GROUPS.items():
            page.get_by_label(label, exact=True).select_option(option)
        settings = SMALL | settings
    for key, value in settings.items():
        field = page.get_by_label(key, exact=True)
        if not field.count():
            page.get_by_label("Another setting").select_option(key)
            page.get_by_role("button", name="Add").last.click()
        if field.evaluate("(node) => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def _start(page: Page) -> None:
    page.get_by_role("button", name="Start training").click()
    page.wait_for_url(re.compile("#/trainings/."))


def test_real_trainings(browser: Browser, url: str) -> None:
    with watched_page(browser, url) as watched:
        page = watched.page
        state = page.locator("h1 + span .badge")
        expect(page.locator("#connection")).to_have_text("live")
        page.get_by_role("button", name="Each device").click()
        expect(page.get_by_role("meter", name="Memory").first).to_have_attribute(
            "aria-valuetext", re.compile("GiB of")
        )

        _choose(page, **{"trainer.max_steps": "none"})
        _expect_refused(page)
        _choose(page, **{"trainer.max_steps": "20"})
        expect(page.get_by_text("2 devices chosen, effective batch 64")).to_be_visible(timeout=SLOW_MS)
        expect(page.get_by_text(re.compile("^32 samples a step.* – fits$"))).to_have_count(2)
        _start(page)
        expect(state).to_have_text("completed", timeout=SLOW_MS)
        expect(page.get_by_text("step 20 of 20, 100 %")).to_be_visible()
        expect(page.get_by_text(re.compile(r"^emulated:\S+ 50.0 %$"))).to_have_count(2)
        expect(page.get_by_role("figure", name="Loss").locator("figcaption")).to_contain_text("last")
        expect(page.get_by_text("Emulated devices: arithmetic is real")).to_be_visible()

        _choose(page, **{"trainer.max_steps": "1000000", "trainer.max_epochs": "100000"})
        _start(page)
        expect(state).to_have_text("running", timeout=SLOW_MS)
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop training").click()
        expect(state).to_have_text("stopped", timeout=SLOW_MS)

        _choose(page, **{"optimizer.lr": "1000000", "trainer.max_steps": "200"})
        _start(page)
        expect(state).to_have_text("failed", timeout=SLOW_MS)
        expect(page.locator(".failure pre")).to_contain_text("not finite")
        page.get_by_role("link", name="All trainings").click()
        expect(page.locator("tbody tr")).to_have_count(3)
        expect(page.locator("tbody .badge")).to_have_text(["failed", "stopped", "completed"])


def _expect_refused(page: Page) -> None:
    """Start with a wrong value: it is told beside its field, and nothing starts."""
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_label("trainer.max_steps")).to_be_focused()
    expect(page.locator(".field-error").filter(has_text="must be a whole number")).to_be_visible()
