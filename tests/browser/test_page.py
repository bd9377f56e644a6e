"""The dashboard's page in a real browser, with made-up values of a server that knows rare states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_dashboard import DEVICES, FakeDashboard, fake_dashboard

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")

from browser_page import CHROMIUM, started_browser, watched_page
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
VIEWS = ("system", "new", "trainings", "trainings/run-1", "trainings/run-0")


@pytest.fixture
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture
def server() -> Iterator[FakeDashboard]:
    with fake_dashboard() as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: FakeDashboard) -> Iterator[Page]:
    with watched_page(browser, server.url) as watched:
        yield watched.page


def test_devices_together_and_each(page: Page) -> None:
    expect(page.get_by_role("heading", name="System", level=1)).to_be_visible()
    expect(page.get_by_text("4 devices, 1 busy, 1 lost.")).to_be_visible()
    expect(page.get_by_role("meter", name="Memory, sum")).to_have_attribute(
        "aria-valuetext", re.compile("of 64 GiB")
    )
    expect(page.locator("figure").first.locator(".curve")).to_have_count(1)

    page.get_by_role("button", name="Each device").click()

    expect(page.get_by_role("button", name="Each device")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("figure").first.locator("path.curve[d]")).to_have_count(
        3 + 3
    )  # lines, and the legend's samples
    full = page.get_by_role("listitem").filter(has_text="RTX 4090").first
    expect(full).to_contain_text("low memory")
    expect(full).to_contain_text("throttled: thermal")
    expect(page.get_by_text("busy: convnet run-1, rank 0")).to_be_visible()
    little = page.get_by_role("listitem").filter(has_text="Arc A770").first
    expect(little.locator("dd").first).to_have_text("–")  # unknown is never 0
    lost = page.get_by_role("listitem").filter(has_text="RTX 2080 Ti").first
    expect(lost.get_by_role("meter", name="Utilisation")).to_have_attribute("aria-valuetext", "unknown")

    days = page.get_by_role("figure", name="Power").locator(
        "text.tick", has_text=re.compile(r"^\d+ [A-Z][a-z]{2}$")
    )
    page.get_by_role("button", name="30 days").click()
    expect(days).not_to_have_count(0)
    page.get_by_role("button", name="1 day").click()
    expect(days).to_have_count(0)
    power = page.get_by_role("figure", name="Power")
    power.get_by_text("As a table").click()
    expect(power.get_by_role("columnheader", name="cuda:0 RTX 3090")).to_be_visible()
    assert 20 <= power.locator("tbody tr").count() <= 30
    expect(power.locator("figcaption")).to_contain_text("cuda:1 RTX 4090: ")


def test_devices_of_several_machines(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of another machine that has an id of this one's, and one whose machine is silent."""
    other = {"host": "right", "here": False, "selectable": False, "environment": None}
    theirs = [
        DEVICES[0] | other | {"key": "right/0", "name": "H200", "busy": False, "busy_by": None},
        DEVICES[1] | other | {"key": "right/1", "name": "T4", "stale": True, "age_seconds": 840.0},
    ]
    monkeypatch.setattr("fake_dashboard.DEVICES", [*DEVICES, *theirs])

    expect(page.get_by_text("6 devices of 2 machines, 1 busy, 1 lost, 1 stale.")).to_be_visible()
    power = page.get_by_role("meter", name="Power, sum")
    expect(power).to_have_attribute("aria-valuetext", re.compile(r"\(3 of 6\)$"))
    page.get_by_role("button", name="Each device").click()
    here, there = (
        page.get_by_role("listitem").filter(has_text=f"cuda:0@{host}") for host in ("host", "right")
    )
    expect(here.first).to_contain_text("busy: convnet run-1, rank 0")
    expect(there.first).to_contain_text("H200")
    expect(there.first).not_to_contain_text("busy")
    silent = page.get_by_role("listitem").filter(has_text="cuda:1@right").first
    expect(silent).to_contain_text("stale: silent for 14 min")
    expect(silent.get_by_role("meter", name="Utilisation")).to_have_attribute("aria-valuetext", "unknown")
    expect(page.get_by_role("figure", name="Power")).to_contain_text("cuda:0@right H200")

    page.get_by_role("link", name="New training").click()
    expect(page.get_by_role("checkbox", name="RTX 3090")).to_be_enabled()
    expect(page.get_by_role("checkbox", name="H200")).to_have_count(0)
    expect(page.get_by_role("checkbox", name="T4")).to_have_count(0)


def test_two_emulated_cards_from_choice_to_end(page: Page, server: FakeDashboard) -> None:
    page.get_by_role("link", name="New training").click()
    expect(page.get_by_role("heading", name="New training", level=1)).to_be_focused()
    expect(page.locator(".needs").first).to_have_text("")  # busy: not counted
    expect(page.get_by_role("checkbox", name="RTX 2080 Ti")).to_be_disabled()
    page.get_by_role("button", name="Take the recommended: cuda:1, xpu:0").click()
    expect(page.get_by_role("checkbox", name="Arc A770")).to_be_checked()
    expect(page.get_by_text("2 devices chosen, effective batch 64, about 6.15 ms a step.")).to_be_visible()
    page.get_by_role("checkbox", name="RTX 4090").uncheck()
    page.get_by_role("checkbox", name="Arc A770").uncheck()
    for name in ("RTX 3090", "Arc A770"):
        page.get_by_label("Not in this machine").select_option(label=name)
        page.get_by_role("button", name="Add").first.click()
    page.get_by_label("trainer.global_batch_size").fill("96")
    expect(page.get_by_text("2 devices chosen, effective batch 96")).to_be_visible()
    expect(page.get_by_text("64 samples a step, needs 3.1 GiB – fits")).to_be_visible()
    page.get_by_label("trainer.global_batch_size").fill("960")
    expect(page.get_by_text("1 device cannot hold it.")).to_be_visible()
    page.get_by_label("trainer.global_batch_size").fill("96")

    steps = page.get_by_label("trainer.max_steps")
    steps.fill("many")
    page.get_by_role("button", name="Start training").click()
    expect(steps).to_be_focused()
    expect(steps).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#{steps.get_attribute('id')}-wrong")).to_contain_text(
        "must be a whole number from 1, but is many"
    )

    expect(page.get_by_text("2 devices chosen, effective batch 96")).to_be_visible()
    page.get_by_label("Experiment").select_option("gpt_text")
    expect(page.get_by_text("2 devices chosen, effective batch 96")).to_be_visible()
    page.get_by_label("Experiment").select_option("")

    steps.fill("6")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("heading", name="convnet run-new", level=1)).to_be_visible()
    expect(page.get_by_text("Emulated devices: arithmetic is real")).to_be_visible()
    expect(page.locator("h1 + span .badge")).to_have_text("completed")
    expect(page.get_by_role("status").filter(has_text="is completed")).to_have_count(1)
    expect(page.get_by_role("progressbar", name="Progress")).to_have_js_property("value", 1)
    expect(page.get_by_text("step 6 of 6, 100 %")).to_be_visible()
    expect(page.get_by_role("region", name="Last lines of the log")).to_contain_text("step 6 ")
    expect(page.get_by_text("emulated:rtx_3090 66.7 %")).to_be_visible()
    assert next(reversed(server.trainings.values()))["gpu_ids"] == ["emulated:rtx_3090", "emulated:arc_a770"]


def test_stop_asks_first(page: Page, server: FakeDashboard) -> None:
    page.goto(f"{server.url}#/trainings")
    page.get_by_role("link", name="convnet run-1").click()
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.click()
    expect(page.get_by_role("dialog", name="Stop this training?")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(stop).to_be_focused()
    assert server.trainings["run-1"]["state"] == "running"

    stop.click()
    page.get_by_role("button", name="Stop training").click()

    expect(page.locator("h1 + span .badge")).to_have_text("stopped")
    page.get_by_role("link", name="All trainings").click()
    page.get_by_label("State").select_option("stopped")
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_failed_one_tells_why_and_can_be_removed(page: Page, server: FakeDashboard) -> None:
    page.goto(f"{server.url}#/trainings")
    row = page.get_by_role("row", name="convnet run-0")
    expect(row).to_contain_text("failed")
    heights = page.locator("tbody .badge").evaluate_all("(all) => all.map((one) => one.offsetHeight)")
    assert len(set(heights)) == 1, "a state takes two lines"
    expect(page.get_by_role("link", name="Report of convnet run-done")).to_have_attribute(
        "href", re.compile(r"run-done/report$")
    )
    row.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Why it failed")).to_be_visible()
    expect(page.get_by_text("an illegal memory access was encountered")).to_be_visible()
    page.get_by_role("button", name="Remove from the list").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("heading", name="Trainings", level=1)).to_be_focused()
    expect(page.get_by_role("row", name="convnet run-0")).to_have_count(0)
    assert "run-0" not in server.trainings


def test_a_lost_connection_is_told_and_found_again(browser: Browser) -> None:
    with fake_dashboard() as server:
        port, url = server.port, server.url
        entered = watched_page(browser, url, allowed=r"ERR_CONNECTION|WebSocket|net::ERR")
        page = entered.__enter__().page
        expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#connection")).to_have_text("connection lost")
    expect(page.get_by_role("alert").filter(has_text="Connection lost, trying again")).to_be_visible()
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#connection")).to_have_text("connection lost")
    with fake_dashboard(port):
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#lost")).to_be_hidden()
        entered.__exit__(None, None, None)


def test_a_token_is_asked_for_and_kept(browser: Browser) -> None:
    with fake_dashboard(token="secret-of-this-server") as server:
        with watched_page(browser, server.url, allowed="401") as watched:
            page = watched.page
            dialog = page.get_by_role("dialog", name="Token needed")
            expect(dialog.get_by_label("Token")).to_be_focused()
            page.keyboard.type("wrong")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("The server refused this token.")
            page.keyboard.type("secret-of-this-server")
            page.keyboard.press("Enter")
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.get_by_text("4 devices, 1 busy, 1 lost.")).to_be_visible()
            page.reload()
            expect(page.locator("#connection")).to_have_text("live")
            assert not any("secret" in line for line in server.requests)
        with watched_page(browser, f"{server.url}#token=secret-of-this-server") as watched:
            expect(watched.page.locator("#connection")).to_have_text("live")
            assert "secret" not in watched.page.url


def test_keyboard_alone_is_enough(page: Page, server: FakeDashboard) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    keyboard = page.keyboard
    keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    keyboard.press("Tab")
    expect(page.get_by_role("button", name="All together")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keyboard.press("Tab")
    keyboard.press("Space")
    expect(page.get_by_role("button", name="Each device")).to_have_attribute("aria-pressed", "true")
    page.goto(f"{server.url}#/new")
    expect(page.get_by_label("Model")).to_be_visible()
    expect(page.get_by_role("button", name="Take the recommended")).to_be_visible()
    page.locator("main").focus()
    order = []
    for _ in range(16):
        keyboard.press("Tab")
        order.append(
            page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).textContent.trim()")
        )
        if order[-1].startswith("Arc A770"):
            keyboard.press("Space")
    assert [word.split(" ")[0] for word in order[:4]] == ["Take", "RTX", "RTX", "Arc"]
    start = order.index("Start training")
    assert start > order.index("trainer.max_steps") > order.index("Model") > order.index("Experiment") > 4
    page.get_by_label("trainer.max_steps").focus()
    keyboard.type("3")
    keyboard.press("Enter")
    expect(page.locator("h1 + span .badge")).to_have_text("completed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_can_be_read_by_everyone(browser: Browser, server: FakeDashboard, scheme: str) -> None:
    """Names, labels, headings, contrast; no scrolling aside on a narrow screen; nothing moves needlessly."""
    options: dict[str, Any] = {
        "viewport": {"width": 360, "height": 720},
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    with watched_page(browser, server.url, **options) as watched:
        for view in VIEWS:
            watched.page.goto(f"{server.url}#/{view}")
            expect(watched.page.locator("h1")).to_have_count(1)
            if view == "system":
                watched.page.get_by_role("button", name="Each device").click()
                expect(watched.page.locator(".cards > li")).to_have_count(4)
            elif view == "new":
                expect(watched.page.get_by_label("trainer.max_steps")).to_be_visible()
            expect(watched.page.locator("main")).not_to_contain_text("Asking")
            assert watched.complaints() == [], view
