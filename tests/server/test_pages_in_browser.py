"""The pages as a visitor sees them, in a real browser, on a real server."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from server.browser import chromium, opened
from server.live_server import OPEN, TIMEOUT, LiveServer, live_server

PHONE = {"viewport": {"width": 390, "height": 844}}
REQUEST = {"X-Request-Id": "a-long-one"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


class LongRequest:
    """Four samples that go on until nobody listens to them any more."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._over = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> LongRequest:
        self._thread.start()
        assert self._begun.wait(TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(TIMEOUT)

    def _listen(self) -> None:
        body = {
            "prompt": list(range(20, 60)),
            "n": 4,
            "max_tokens": 1800,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self._server.url}/v1/completions"
        while not self._over.is_set():
            with httpx.stream("POST", url, json=body, headers=REQUEST, **OPEN) as reply:
                for _ in reply.iter_lines():
                    self._begun.set()
                    if self._over.is_set():
                        break


def light_of(page: Page) -> float:
    """How light the page is, 0 to 255."""
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3


def is_wider_than_its_window(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def as_soon_as(page: Page, condition: str, script: str) -> Any:
    """What the script finds, once `condition` holds for it, both of one and the same frame."""
    code = f"() => {{ const found = {script}; return ({condition}) && found; }}"
    return page.wait_for_function(code).json_value()


def look_at_running_request(page: Page) -> None:
    row = page.locator("#requests button", has_text="a-long-one").first
    expect(row).to_contain_text("4 samples")
    row.focus()  # the keyboard is enough: the tables show
    tables = page.locator("#table-of .chips")
    expect(tables.first.locator(".chip.shared").first).to_be_visible()
    first = as_soon_as(
        page,
        "found.length === 4",
        """[...document.querySelectorAll("#table-of .chips")]
        .map((table) => table.querySelector(".chip")?.innerText)""",
    )
    assert len(set(first)) == 1  # the prompt's first block is one and the same
    page.locator("#pool").focus()
    page.keyboard.press("Home")
    told = page.locator("#told")
    expect(told).to_contain_text("Block 1:")
    page.keyboard.press("ArrowRight")
    expect(told).to_contain_text("Block 2:")
    # At first three, which all samples share; then each has a last one of its own.
    number = 'Number(document.querySelector("#pool-numbers b").innerText)'
    held = as_soon_as(page, "found >= 4", number)
    assert held <= 512
    expect(page.locator("#events li", has_text="a-long-one").first).to_be_visible()
    expect(page.locator("#v-output")).not_to_have_text("0")
    # Something other than free blocks is drawn.
    as_soon_as(
        page,
        "found > 3",
        """(() => { const c = document.getElementById("pool");
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return new Set(new Uint32Array(d.buffer)).size; })()""",
    )


def test_dashboard_shows_a_running_request(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/") as page:
        expect(page.locator("#link")).to_have_text("live")
        with LongRequest(server):
            look_at_running_request(page)
    # Gone from the pool when nobody listens any more.
    attempts = 1000
    while server.get("/debug/kv").json()["requests"] and attempts:
        attempts -= 1
        time.sleep(0.03)
    assert attempts


@pytest.mark.slow  # a server with two engines for itself
def test_any_replica_can_be_shown(browser: Browser) -> None:
    with live_server("--replicas", "2") as two:
        with opened(browser, f"{two.url}/?replica=1") as page:
            menu = page.locator("#replica")
            expect(menu).to_have_value("1")
            expect(page.locator("#link")).to_have_text("live")
            menu.select_option("0")
            page.wait_for_url("**/?replica=0")
            expect(page.locator("#replica")).to_have_value("0")
        with opened(browser, f"{two.url}/?replica=7", expected="status of 404") as page:
            expect(page.locator("body")).to_contain_text("7 is not one of the 2 replicas")


def test_a_hidden_page_asks_for_nothing(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/") as page:
        link = page.locator("#link")
        expect(link).to_have_text("live")
        page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => self.away})")
        page.add_init_script("self.away = true")
        page.reload()
        expect(link).to_have_text("paused")
        page.evaluate("self.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        expect(link).to_have_text("live")
        page.evaluate("self.away = true; document.dispatchEvent(new Event('visibilitychange'))")
        expect(link).to_have_text("paused")


def test_playground_streams_and_shows_the_tree(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/") as page:
        expect(page.locator("#link")).to_have_text("live")
        page.fill("#prompt", "Once upon a time")
        page.fill("#max-tokens", "200")
        page.fill("#n", "3")
        page.locator("#prompt").press("Control+Enter")
        answers = page.locator(".answer")
        expect(answers).to_have_count(3)
        expect(page.locator("#stop")).to_be_disabled(timeout=60_000)
        expect(page.locator("#play-numbers")).to_contain_text("generated")
        for index in range(3):
            text = answers.nth(index).inner_text()
            assert text.startswith("Once upon a time")
            assert len(text) > 40
        page.select_option("#method", "beam")
        expect(page.locator("#n-label")).to_have_text("Beams")
        page.fill("#n", "4")
        page.fill("#max-tokens", "300")  # long enough for some frames
        page.click("#run")
        expect(answers).to_have_count(4)
        expect(page.locator("#tree rect.tree-block").first).to_be_visible()
        title = page.locator("#tree-title").inner_text()
        held, unshared = map(int, re.findall(r"(\d+) blocks.* hold (\d+)", title)[0])
        assert held < unshared
        page.get_by_label("Chat").check()
        page.select_option("#method", "sample")
        page.fill("#n", "1")
        page.click("#run")
        expect(answers).to_have_count(1)
        expect(answers.first).to_contain_text(re.compile(r"\w"))


def test_the_first_click_shows_sharing(server: LiveServer, browser: Browser) -> None:
    """The page's own prompt and settings; before it, each card says what will come."""
    with opened(browser, f"{server.url}/") as page:
        expect(page.locator("#link")).to_have_text("live")
        for name in ("play-empty", "no-events", "no-requests"):
            expect(page.locator(f"#{name}")).to_have_text(re.compile(r"\w+ \w+"))
        expect(page.locator("#play-empty")).to_be_visible()
        page.click("#run")
        expect(page.locator("#play-empty")).to_be_hidden()
        expect(page.locator("#stop")).to_be_disabled(timeout=60_000)
        expect(page.locator("#tree-title")).to_contain_text("4 samples hold")
        title = page.locator("#tree-title").inner_text()
        held, unshared = map(int, re.findall(r"4 samples hold (\d+) blocks.* hold (\d+)", title)[0])
        assert unshared - held >= 12  # four blocks of the prompt, three times saved
        assert page.locator("#tree .tree-label").all_text_contents() == ["0", "1", "2", "3"]
        for name in ("no-events", "no-requests"):
            expect(page.locator(f"#{name}")).to_be_hidden()
        expect(page.locator(".answer").first).to_have_text(re.compile("^… .*problem: "))
        page.locator("#requests button").first.hover()
        tables = page.locator("#table-of .chips > :first-child").all_text_contents()
        assert tables == ["0:", "1:", "2:", "3:"]


def test_playground_shows_a_call_and_goes_on_with_its_result(
    server: LiveServer, browser: Browser
) -> None:
    with opened(browser, f"{server.url}/") as page:
        page.get_by_text("Tools and form of the answer").click()
        expect(page.locator("#tools")).to_be_hidden()  # a completion has none
        page.click("#example")
        expect(page.locator("#tools")).to_be_visible()
        page.click("#run")
        call = page.locator(".answer .call")
        expect(call).to_have_text('get_weather({"city": "Paris"})')
        page.get_by_label("Result of get_weather").fill("rainy")
        page.get_by_role("button", name="Give result").click()
        expect(page.locator(".answer")).to_have_count(2)
        expect(page.locator(".answer .result")).to_have_text("→ rainy")
        expect(page.locator(".answer").nth(1)).to_have_text("It is rainy in Paris.")
        expect(call).to_be_visible()
        page.click("#run")  # from the beginning
        expect(page.locator(".answer")).to_have_count(1)
        expect(call).to_have_count(1)


def test_playground_keeps_answers_to_a_schema(server: LiveServer, browser: Browser) -> None:
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}}
    schema |= {"required": ["sky"], "additionalProperties": False}
    with opened(browser, f"{server.url}/") as page:
        page.get_by_text("Tools and form of the answer").click()
        page.fill("#schema", json.dumps(schema))
        page.fill("#n", "1")
        for kind in ("Completion", "Chat"):
            page.get_by_label(kind).check()
            page.fill("#prompt", "How is the sky?")
            page.click("#run")
            expect(page.locator("#stop")).to_be_disabled(timeout=60_000)
            said = page.locator(".answer .said").inner_text()
            assert json.loads(said)["sky"] in ("blue", "grey")
        page.fill("#schema", "{")
        page.click("#run")
        expect(page.locator("#play-error")).to_contain_text("schema: ")
        page.fill("#schema", "")
        page.fill("#tools", "[1")
        page.click("#run")
        expect(page.locator("#play-error")).to_contain_text("tools: ")
        expect(page.locator("#run")).to_be_enabled()


def test_playground_tells_what_is_wrong(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/", expected="status of 400") as page:
        page.fill("#prompt", "")
        page.click("#run")
        expect(page.locator("#play-error")).to_contain_text("prompt")
        expect(page.locator("#run")).to_be_enabled()


def test_pool_by_hand(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/pool") as page:
        page.click("#textbook")
        expect(page.locator("#lesson")).to_contain_text("12 against 16")
        expect(page.locator("#paged")).to_have_text("8")
        expect(page.locator("#naive")).to_have_text("20")
        assert page.locator(".block.shared").count() == 4
        check_all_beams_can_be_seen(page)
        page.get_by_role("button", name="append 10 more tokens to each beam").click()
        expect(page.locator("#paged")).to_have_text("12")
        expect(page.locator("#naive")).to_have_text("24")
        page.get_by_role("button", name="free A", exact=True).click()
        expect(page.locator("#paged")).to_have_text("10")
        page.click("#undo")
        expect(page.locator("#paged")).to_have_text("12")


def check_all_beams_can_be_seen(page: Page) -> None:
    """Whether the buttons fit into one line or wrap, no beam is cut off by the end of the list."""
    for width in (1360, 1050, 390):
        page.set_viewport_size({"width": width, "height": 844})
        hidden = "(list) => list.scrollHeight - list.clientHeight"
        assert page.locator("#sequences").evaluate(hidden) == 0, width


def test_the_textbook_case_leads_on_to_a_copy_on_write(
    server: LiveServer, browser: Browser
) -> None:
    with opened(browser, f"{server.url}/pool") as page:
        numbers, lesson = page.locator("#pool-numbers"), page.locator("#lesson")
        page.click("#textbook")
        expect(numbers).to_contain_text("0 copied on write")
        page.get_by_role("button", name="next: drop beam D, continue beam A twice").click()
        expect(lesson).to_contain_text("share even their last block, 5, of which 10 of 16")
        expect(page.locator(".block.shared")).to_have_count(5)
        page.get_by_role("button", name="next: append a token to E").click()
        expect(lesson).to_contain_text("5 → 8: copy-on-write")
        expect(numbers).to_contain_text("1 copied on write")
        expect(page.locator("#happened")).to_have_text(
            "copy-on-write: E copies block 5 into block 8."
        )
        page.click("#reset")
        expect(lesson).to_be_hidden()


def test_pool_by_keyboard_alone(server: LiveServer, browser: Browser) -> None:
    with opened(browser, f"{server.url}/pool") as page:

        def press_until(label: str) -> None:
            """Tab until the element of this name has the focus, and press Enter there."""
            for _ in range(40):
                page.keyboard.press("Tab")
                name = page.evaluate(
                    "document.activeElement.ariaLabel || document.activeElement.textContent"
                )
                if name == label:
                    page.keyboard.press("Enter")
                    return
            raise AssertionError(f"no way to {label!r} by keyboard")

        press_until("New sequence")
        press_until("append tokens to A")
        expect(page.locator("#paged")).to_have_text("1")
        press_until("fork A")
        expect(page.locator("#naive")).to_have_text("2")
        press_until("rewrite the last token of B")
        expect(page.locator("#happened")).to_contain_text("copies block 1 into block 2")
        page.locator(".block").first.focus()
        page.keyboard.press("ArrowRight")
        focused = page.evaluate("document.activeElement.ariaLabel")
        assert focused == "block 2: held by B; 16 of 16 tokens"


@pytest.mark.parametrize("path", ["/", "/pool"])
def test_light_dark_and_phone(server: LiveServer, browser: Browser, path: str) -> None:
    with opened(browser, f"{server.url}{path}", color_scheme="light") as page:
        assert light_of(page) > 200
    with opened(browser, f"{server.url}{path}", color_scheme="dark", **PHONE) as page:
        assert light_of(page) < 60
        if path == "/pool":
            page.click("#textbook")
            expect(page.locator("#paged")).to_have_text("8")
        else:
            expect(page.locator("#link")).to_have_text("live")
        assert not is_wider_than_its_window(page)


def test_every_control_has_a_name(server: LiveServer, browser: Browser) -> None:
    for path in ("/", "/pool"):
        with opened(browser, f"{server.url}{path}") as page:
            nameless = page.evaluate(
                """() => [...document.querySelectorAll("button, input, select, textarea, canvas")]
                .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length))
                .map((e) => e.outerHTML)"""
            )
            assert json.dumps(nameless) == "[]"
