"""The pages in a real browser: Debian's chromium without a window, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conformance.conftest import Server

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: run make services")
LONG_MS = 120_000.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages. The test fails if one of them logs an error."""
    contexts: list[Any] = []
    errors: list[str] = []

    def open_page(url: str, *, fails: bool = False, **options: Any) -> Any:
        """`fails`: requests that the server refuses are part of the test; browsers log them as errors."""
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(LONG_MS)
        page = context.new_page()
        if not fails:
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def violations(page: Any) -> list[str]:
    """What axe finds, with the elements that it found it in."""
    page.evaluate(AXE.read_text())  # not as a script of the page, whose policy forbids it
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'best-practice']})")
    return [f"{each['id']}: {[node['target'] for node in each['nodes']]}" for each in found["violations"]]


def asked(page: Any, question: str) -> None:
    page.wait_for_selector("#model-a option", state="attached")
    page.fill("#message", question)
    page.press("#message", "Enter")
    page.wait_for_selector("#send:not([disabled])")


def test_the_playground_shows_an_answer_and_its_times(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground")
    asked(page, "What is paging?")
    assert page.locator(".turn.user").inner_text() == "What is paging?"
    answer = page.locator(".turn:not(.user)")
    assert len(answer.locator(".text").inner_text()) > 3
    names = answer.locator(".figures dt").all_inner_texts()
    assert {"first token", "total", "prompt", "answer"} <= set(names)
    assert "prefill" in answer.locator(".stages").get_attribute("aria-label")
    asked(page, "And what is a block?")
    assert page.locator(".turn").count() == 4


def test_the_playground_compares_two_models(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground")
    page.wait_for_selector("#model-b option:nth-child(2)", state="attached")
    page.select_option("#model-b", index=1)
    page.fill("#temperature", "0")
    asked(page, "What is paging?")
    texts = page.locator(".turn:not(.user) .text").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_an_answer_is_text_and_never_markup(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground")
    asked(page, "<img src=x onerror=\"document.title='run'\"> & <b>bold</b>")
    assert page.locator(".turn.user").inner_text().startswith("<img src=x")
    assert page.title() == "Playground · Headrace"
    assert page.locator(".turn img, .turn b").count() == 0


def test_the_playground_writes_the_call_as_code(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground")
    page.wait_for_selector("#model-a option", state="attached")
    page.fill("#message", "It's here")
    page.click("#code summary")
    snippet = page.locator("#snippet")
    assert snippet.inner_text().startswith(f"curl {server.url}/v1/chat/completions")
    assert "It'\\''s here" in snippet.inner_text()
    page.click("#tab-python")
    code = snippet.inner_text()
    compile(code, "snippet", "exec")
    assert f'base_url="{server.url}/v1"' in code


def test_wrong_tools_are_explained_and_nothing_is_sent(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground")
    page.wait_for_selector("#model-a option", state="attached")
    page.click("text=Tools")
    page.fill("#tools", "{")
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    page.wait_for_selector("#tools-error:not([hidden])")
    assert "not valid JSON" in page.locator("#tools-error").inner_text()
    assert page.locator(".turn").count() == 0


def test_the_dashboard_follows_the_server(server: Server, opened: Callable[..., Any], http: httpx2.Client) -> None:
    page = opened(server.url)
    page.wait_for_selector("#state.live")
    assert page.locator("#charts svg[data-plot]").count() == 6
    name = f"req-for-the-dashboard-{page.locator('#slowest tbody tr').count()}"
    chat = {"messages": [{"role": "user", "content": "What is paging?"}], "max_tokens": 300, "ignore_eos": True}
    http.post("/v1/chat/completions", json=chat, headers={"x-request-id": name}).raise_for_status()
    page.click(f"#slowest button:text-is('{name}')")  # appears with the next snapshot
    page.wait_for_selector(".waterfall")
    stages = page.locator(".waterfall > span").all_inner_texts()
    assert {"identify", "shape", "queue", "prefill", "decode", "settle"} <= set(stages)
    page.click("#request-dialog button")
    assert page.locator("#variants tbody th").all_inner_texts() == ["mini"]
    assert page.locator("#engines tbody th").all_inner_texts() == ["mini 0"]
    assert page.locator("#stages .stages").get_attribute("aria-label").count("decode") == 1


def test_the_dashboard_can_be_paused_and_read_by_keyboard(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url)
    page.wait_for_selector("#state.live")
    page.focus("#pause")
    page.press("#pause", "Enter")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    page.focus("#charts figure:first-child svg")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#tip:not([hidden])")
    assert "answered" in page.locator("#tip").inner_text()


CONFIG = """
[[keys]]
name = "ops"
key = "key-of-ops"
admin = "write"

[models.mini.options]
threads = 1

[models.mini.variants.int4]
weights = "int4"

[fast]
max_tokens = 50

[routing.shadows.check]
variant = "mini@int4"
share = 1.0

[drift]
share = 1.0

[canary]
pairs = 1.0
queue = 256
every_s = 0.2
"""


@pytest.fixture(scope="module")
def administered(starting: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    config = tmp_path_factory.mktemp("administered") / "headrace.toml"
    config.write_text(CONFIG)
    return starting("--config", str(config))


def enter_key(page: Any) -> None:
    page.wait_for_selector("#problem:not([hidden])")
    page.click("#key-button")
    page.fill("#key", "key-of-ops")
    page.press("#key", "Enter")
    page.wait_for_selector("#state.live")


def chat(server: Server, number: int) -> str:
    """Ask in a conversation of its own; return the variant that answered."""
    body = {
        "messages": [{"role": "user", "content": f"What is paging? {number}"}],
        "max_tokens": 4,
        "metadata": {"conversation": str(number)},
    }
    headers = {"authorization": "Bearer key-of-ops"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return answer.json()["model"]


def test_with_keys_the_dashboard_needs_an_administrators(administered: Server, opened: Callable[..., Any]) -> None:
    page = opened(administered.url, fails=True)
    page.wait_for_selector("#problem:not([hidden])")
    assert page.locator("#now").inner_text() == ""
    enter_key(page)
    page.click("text=Switch fast mode on")
    page.wait_for_selector("text=Fast mode is on for all tenants.")
    page.click("text=Switch fast mode off")
    page.wait_for_selector("text=Fast mode is off.")
    assert "key-of-ops" not in page.content()


def test_a_canary_is_started_watched_and_rolled_back_in_the_lab(
    administered: Server, opened: Callable[..., Any]
) -> None:
    page = opened(f"{administered.url}/lab", fails=True)
    enter_key(page)
    assert "No canary" in page.locator("#canaries").inner_text()
    page.click("#start summary")
    assert (page.input_value("#candidate"), page.input_value("#control")) == ("mini@int4", "mini")
    page.fill("#stages", "no number")
    page.click("#start-form button")
    assert "ascending percentages" in page.locator("#start-error").inner_text()
    page.fill("#stages", "50, 80")
    page.fill("#start-reason", "half the memory")
    page.click("#start-form button")
    page.wait_for_selector(".phase.running")
    assert page.locator(".steps .now").inner_text() == "50 %"
    assert "half the memory" in page.locator("#canaries .why").inner_text()
    assert {chat(administered, number) for number in range(12)} == {"mini", "mini@int4"}
    rows = page.locator(".arms tbody tr")
    requests = rows.filter(has_text="requests").locator("td")
    sync_api.expect(requests.nth(0)).not_to_have_text("0", timeout=LONG_MS)
    page.wait_for_selector(".arms tbody th:text-is('first token p95')")
    assert page.locator(".arms thead th").all_inner_texts()[1:3] == ["mini", "mini@int4"]
    sync_api.expect(page.locator("#shadows tbody td").nth(2)).not_to_have_text("0", timeout=LONG_MS)
    if AXE.exists():
        assert violations(page) == []
    page.click("button:text-is('Roll back')")
    page.fill("#end-reason", "tried enough")
    page.click("#end-do")
    page.wait_for_selector(".phase.rolled_back")
    assert "Rolled back by ops" in page.locator("#canaries .why").inner_text()
    assert "tried enough" in page.locator("#canaries .why").inner_text()
    assert "rolled back" in page.locator("#announce").text_content()
    assert {chat(administered, number) for number in range(6)} == {"mini"}
    page.set_viewport_size({"width": 375, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: run make services")
def test_the_lab_is_accessible_in_both_themes(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/lab", color_scheme="dark")
    page.wait_for_selector("#state.live")
    assert violations(page) == []
    page.click("#theme")
    assert violations(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: run make services")
def test_the_dashboard_is_accessible(server: Server, opened: Callable[..., Any], theme: str) -> None:
    page = opened(server.url, color_scheme=theme)
    page.wait_for_selector("#state.live")
    assert violations(page) == []


def test_the_dashboard_fits_a_phone(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(server.url, viewport={"width": 375, "height": 740})
    page.wait_for_selector("#state.live")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: run make services")
def test_the_playground_is_accessible(server: Server, opened: Callable[..., Any], theme: str) -> None:
    page = opened(f"{server.url}/playground", color_scheme=theme)
    asked(page, "What is paging?")
    page.click("#code summary")
    assert violations(page) == []


def test_the_playground_fits_a_phone(server: Server, opened: Callable[..., Any]) -> None:
    page = opened(f"{server.url}/playground", viewport={"width": 375, "height": 740})
    asked(page, "What is paging?")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
