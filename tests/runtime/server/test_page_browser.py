"""The page in headless Chromium, over the toy model, in both colour schemes and at two widths."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from redraft.runtime import Runtime, SamplingParams
from tests.runtime.fakes import script
from tests.runtime.server.serving import USER, WAIT, Gate, listening, toy

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install 'redraft[browser]'")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow, pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]  # fmt: skip
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
FORMS = [(width, scheme) for width in (1280, 380) for scheme in ("light", "dark")]
MARKUP = b'<img src="x" onerror="document.title=1"><b>bold</b>'
PROMPT = len("user: hi\nassistant: ")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Open the page of a server over a runtime. No test may leave an error, or ask another server for anything."""
    with ExitStack() as stack:
        found: list[str] = []
        expected: list[str] = []

        def call(
            runtime: Runtime, width: int = 1280, scheme: str = "light", errors: tuple[str, ...] = (), **settings: Any
        ) -> Any:
            url, _ = stack.enter_context(listening(runtime, **settings))
            context = stack.enter_context(
                browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            )
            page = context.new_page()
            page.set_default_timeout(WAIT * 1e3)
            page.on("request", lambda request: request.url.startswith(url) or found.append(request.url))
            page.on("pageerror", lambda error: found.append(str(error)))
            page.on("console", lambda line: line.type in ("error", "warning") and found.append(line.text))
            expected.extend(errors)
            page.goto(f"{url}/")
            return page

        yield call
        assert [line for line in found if not any(text in line for text in expected)] == []


def ready(page: Any) -> Any:
    """Wait until the page knows the model."""
    page.locator("#method option").nth(1).wait_for(state="attached")
    return page


def ask(page: Any, text: str = "hi") -> None:
    ready(page).locator("#message").fill(text)
    page.keyboard.press("Enter")


def ended(page: Any) -> str:
    """Wait for the end of the answer, and return its figures."""
    page.locator("#send").wait_for()
    return str(page.locator(".answer-figures").last.inner_text())


@pytest.mark.parametrize(("width", "scheme"), FORMS)
def test_an_answer_its_sources_its_drafts_and_the_batch(visit: Open, width: int, scheme: str) -> None:
    gate = Gate(free=PROMPT + 40)
    with toy(gate) as runtime:
        page = visit(runtime, width, scheme)
        ready(page).locator("#nodes").fill("4")
        ask(page)
        assert gate.reached.wait(WAIT)
        page.locator("#rows tr.decoding").wait_for()
        row = page.locator("#rows tr.decoding").inner_text().split()
        assert row[:3] == ["decoding", "ngram", str(PROMPT)]
        assert page.locator("#log").get_attribute("aria-busy") == "true"
        gate.opened.set()
        figures = ended(page)
        assert "tokens" in figures
        assert page.locator("#log").get_attribute("aria-busy") == "false"
        (expected,) = runtime.generate(["user: hi\nassistant: "], SamplingParams(max_tokens=runtime.max_model_len))
        assert page.locator(".answer .text").text_content() == expected.text
        classes = page.locator(".answer .token").evaluate_all("all => all.map(one => one.className)")
        assert {"token lookup", "token bonus"} <= set(classes)
        lines = {
            name: page.locator(f"#legend .{name}").evaluate("one => getComputedStyle(one).textDecorationStyle")
            for name in ("drafter", "resampled", "lookup", "bonus")
        }
        assert len(set(lines.values())) == 4  # told apart without colours
        page.locator("#tree svg").wait_for()
        chosen = page.locator(".answer .token.lookup").first
        chosen.click()
        assert page.locator("#tree .node.lookup.accepted").count() > 0
        assert re.fullmatch(r"lookup: [1-4] of [1-4] accepted", page.locator("#draft-caption").inner_text())
        step = int(chosen.get_attribute("data-step"))
        page.locator("#before").focus()
        page.keyboard.press("Enter")
        assert page.locator("#place").inner_text().startswith(f"step {step} of")
        seen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert seen[0] <= seen[1]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (ground < 60) == (scheme == "dark")


def test_escape_stops_the_answer_and_the_conversation_goes_on(visit: Open) -> None:
    gate = Gate(free=PROMPT + 30)
    with toy(gate) as runtime:
        page = visit(runtime)
        ask(page)
        assert gate.reached.wait(WAIT)
        page.keyboard.press("Escape")
        assert ended(page).endswith("stopped")
        gate.opened.set()
        page.locator("#rows tr.none").wait_for()
        assert runtime.health.requests == 0
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "more")
        messages = sent.value.post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"] == page.locator(".answer .text").first.text_content()
        ended(page)
        page.locator("#new").click()
        assert page.locator(".message").count() == 0
        assert page.evaluate("document.activeElement.id") == "message"


def test_shift_enter_begins_a_line(visit: Open) -> None:
    with toy() as runtime:
        page = ready(visit(runtime))
        page.keyboard.type("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        assert page.locator("#message").input_value() == "a\nb"
        assert page.locator(".message").count() == 0


def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(visit: Open) -> None:
    with toy() as runtime:
        page = visit(runtime, api_keys=("right",), errors=("401",))
        page.locator("#key-dialog").wait_for()
        for given in ("wrong", "right"):
            page.locator("#key-input").fill(given)
            page.keyboard.press("Enter")
            if given == "wrong":
                page.get_by_text("does not know this key").wait_for()
        ready(page)
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        ask(page)
        assert "tokens" in ended(page)
        page.reload()
        ready(page)
        assert page.locator("#key-dialog").is_hidden()


def test_an_error_is_shown_and_the_message_is_not_kept(visit: Open) -> None:
    with toy() as runtime:
        page = visit(runtime, errors=("400",), max_prompt_tokens=PROMPT)
        ask(page, "a message that is too long")
        assert "at most 20 tokens" in page.get_by_role("alert").inner_text()
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page)
        assert len(sent.value.post_data_json["messages"]) == 1
        ended(page)


def test_a_message_that_no_answer_follows_goes_back_into_its_box(visit: Open) -> None:
    gate = Gate(free=PROMPT + 10)
    with toy(gate, max_num_seqs=1, max_waiting=0) as runtime:
        page = ready(visit(runtime, errors=("429",)))
        body = {"model": "toy", "messages": [USER], "stream": True}
        with httpx.stream("POST", f"{page.url}v1/chat/completions", json=body) as other:
            assert gate.reached.wait(WAIT)
            ask(page, "mine")
            page.get_by_role("alert").wait_for()
            ended(page)
            assert page.locator("#message").input_value() == "mine"
            gate.opened.set()
            assert other.read()


def test_the_page_waits_for_a_server_that_cannot_answer_yet(visit: Open) -> None:
    with toy() as runtime:
        page = visit(runtime, errors=("503",))
        asked: list[int] = []

        def answer(route: Any) -> None:
            asked.append(len(asked))
            if asked[-1] < 2:
                route.fulfill(status=503, json={"error": {"message": "not yet"}})
            else:
                route.continue_()

        ready(page)
        page.route("**/v1/models", answer)
        page.reload()
        ready(page)
        assert len(asked) == 3
        assert page.get_by_role("alert").all_inner_texts() == ["not yet"]


def test_arrow_keys_choose_steps_of_an_answer(visit: Open) -> None:
    with toy() as runtime:
        page = visit(runtime)
        ask(page)
        ended(page)
        answer = page.locator(".answer").first
        answer.focus()
        for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 1)):
            page.keyboard.press(key)
            assert page.locator("#place").inner_text().startswith(f"step {place} of")
            marked = page.locator(".token.marked").evaluate_all("all => all.map(one => one.dataset.step)")
            assert set(marked) <= {str(place - 1)}
        assert page.locator("#status").text_content().startswith("step 1 of")
        assert page.locator("#after").is_enabled()


def test_a_new_answer_has_no_steps_of_the_last_one(visit: Open) -> None:
    with toy() as runtime:
        page = visit(runtime)
        ask(page)
        ended(page)
        playwright.expect(page.locator("#before")).to_be_enabled()
        page.route("**/v1/chat/completions", lambda route: None)  # never answered
        ask(page, "more")
        page.locator("#stop").wait_for()
        assert page.locator("#before").is_disabled()
        assert page.locator("#after").is_disabled()
        assert page.locator("#place").inner_text() == "–"
        page.keyboard.press("Escape")
        ended(page)


def test_labels_of_a_tree_fit_their_boxes(visit: Open) -> None:
    texts = ["", "漢字漢字漢字", "한국어", "mmmmmm", "👍👍👍"]
    tree = {
        "tokens": [1, 2, 3, 4, 5], "texts": texts, "parents": [-1, 0, 1, 2, 3], "path": [1, 2], "drafters": [],
        "sources": ["root", *["lookup"] * 4], "probs": [None, 1, 1, 1, 1],
    }  # fmt: skip
    with toy() as runtime:
        page = ready(visit(runtime))
        page.evaluate(
            "document.documentElement.style.setProperty('--mono', 'sans-serif')"
        )  # wide and narrow characters
        page.evaluate("tree => import('/page/tree.js').then(module => module.draw(tree))", tree)
        found = page.locator("#tree .node").evaluate_all(
            "all => all.map(one => [one.querySelector('text').getComputedTextLength(),"
            " one.querySelector('rect').width.baseVal.value])"
        )
        assert len(found) == 5
        assert all(text < box < text + 20 for text, box in found), found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_of_controls_can_be_seen(visit: Open, scheme: str) -> None:
    def luminance(colour: str) -> float:
        parts = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    with toy() as runtime:
        page = ready(visit(runtime, scheme=scheme))
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for colours in page.locator("#method, #nodes, #message, #new, #key-input").evaluate_all(
            "all => all.map(one => [getComputedStyle(one).borderTopColor, getComputedStyle(one).backgroundColor])"
        ):
            for behind in (ground, colours[1]):
                low, high = sorted((luminance(colours[0]), luminance(behind)))
                assert (high + 0.05) / (low + 0.05) >= 3, (colours, ground)


def test_what_a_model_writes_is_never_markup(visit: Open) -> None:
    with toy(script(MARKUP, PROMPT)) as runtime:
        page = visit(runtime)
        ask(page)
        ended(page)
        assert page.locator(".answer .text").text_content().startswith(MARKUP.decode())
        assert page.locator("main img, main b b").count() == 0
        assert page.title() == "toy · redraft"


def test_other_requests_are_rows_without_their_text(visit: Open) -> None:
    gate = Gate(free=PROMPT + 10)
    with toy(gate) as runtime:
        page = ready(visit(runtime))
        body = {"model": "toy", "messages": [USER], "speculative_config": False, "stream": True}
        with httpx.stream("POST", f"{page.url}v1/chat/completions", json=body) as other:
            assert gate.reached.wait(WAIT)
            page.locator("#rows tr.decoding").wait_for()
            assert page.locator("#rows tr.decoding").inner_text().split()[:2] == ["decoding", "none"]
            assert "1 of 4 slots" in page.locator("#batch-caption").inner_text()
            gate.opened.set()
            assert other.read()


def test_every_control_has_a_name(visit: Open) -> None:
    with toy() as runtime:
        page = ready(visit(runtime))
        names = page.locator("button:visible, input:visible, select:visible, textarea:visible").evaluate_all(
            "all => all.map(one => one.ariaLabel || one.labels?.[0]?.innerText || one.innerText)"
        )
        assert len(names) == 8
        assert all(re.search(r"\w\w", name) for name in names)
