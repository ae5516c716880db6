"""The page in a headless Chromium: a conversation, a rank killed meanwhile, its looks, keys, and markup from a model.

HETERO_PAGE_PICTURES names a folder that keeps the screenshots.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from hetero_gateway.server.access.files import AccessFiles
from tests.support.browser import chromium
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.unit.server.server_setup import GatewayBench, served_model
from tests.unit.server.test_keys import ENTRIES, write_keys

pytest.importorskip("playwright.async_api", reason="no Playwright: pip install playwright")
from playwright.async_api import Browser, Page, expect

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_MS = 60_000
WIDE, NARROW = 1280, 360
LONG = "Tell a very long story about a lighthouse keeper, with many details."


@pytest.fixture(scope="module")
def group(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroupProcess]:
    folder = tmp_path_factory.mktemp("group")
    # What is measured on a busy machine may leave a rank without a vocabulary, and the picture shows one of each.
    shares = {"attention": [2, 1], "mlp": [1, 1], "vocabulary": [1, 1]}
    manifest = write_manifest(folder, model=smollm2, ranks=2, shares=shares)
    with LocalGroupProcess(manifest, home=folder / "home") as running:
        yield running


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@asynccontextmanager
async def opened(
    browser: Browser, address: str, *, width: int = WIDE, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Page]:
    """The page. At its end it has made no request to anywhere else, and no error."""
    context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    broken: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    await page.goto(f"http://{address}/")
    yield page
    await context.close()
    assert asked
    assert all(url.startswith(f"http://{address}/") for url in asked), asked
    assert not broken


async def say(page: Page, text: str) -> None:
    await page.get_by_role("textbox", name="Message").fill(text)
    await page.keyboard.press("Enter")


def answers(page: Page) -> Any:
    return page.get_by_role("article", name="Model")


async def text_grows(page: Page, beyond: int) -> int:
    """Wait until the last answer is longer; return its length."""
    body = answers(page).last.locator(".body")
    for _ in range(PATIENCE_MS // 100):
        length = len(await body.inner_text())
        if length > beyond:
            return length
        await page.wait_for_timeout(100)
    raise AssertionError(f"no more than {beyond} characters in {PATIENCE_MS} ms")


async def test_a_conversation_is_streamed_stopped_and_continued(browser: Browser, group: LocalGroupProcess) -> None:
    async with opened(browser, group.record.http) as page:
        await expect(page.get_by_role("heading", name="Ask test")).to_be_visible()
        await page.get_by_role("button", name="Parameters").click()
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("Max tokens").fill("8")
        await page.get_by_role("button", name="Parameters").click()
        await say(page, "What is the capital of France?")
        await expect(answers(page).locator(".meta")).to_contain_text("+ 8 tokens · first after", timeout=PATIENCE_MS)
        await expect(answers(page).locator(".meta")).to_contain_text("tok/s")
        first = await answers(page).first.locator(".body").inner_text()
        await page.get_by_label("Max tokens").evaluate("input => input.value = ''")
        await say(page, LONG)
        length = await text_grows(page, 40)
        await text_grows(page, length)  # it streams
        await expect(page.locator("#pace")).to_contain_text("tok/s")
        await page.keyboard.press("Escape")
        await expect(answers(page).last.locator(".meta")).to_contain_text("stopped")
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await expect(page.locator("#figures")).to_contain_text("0 running", timeout=PATIENCE_MS)
        assert await answers(page).first.locator(".body").inner_text() == first
        await page.get_by_role("button", name="New chat").click()
        await expect(answers(page)).to_have_count(0)


async def test_a_refused_question_says_why_and_can_be_mended(browser: Browser, group: LocalGroupProcess) -> None:
    async with opened(browser, group.record.http) as page:
        await say(page, "word " * 4000)
        await expect(page.get_by_role("alert").first).to_contain_text("2048", timeout=PATIENCE_MS)
        box = page.get_by_role("textbox", name="Message")
        assert (await box.input_value()).startswith("word word")
        await page.get_by_role("button", name="Parameters").click()
        await page.get_by_label("Max tokens").fill("4")
        await page.get_by_label("Temperature").fill("0")  # a draw could be the end
        await say(page, "Hello!")
        await expect(answers(page).last.locator(".meta")).to_contain_text("4 tokens", timeout=PATIENCE_MS)


async def test_the_picture_shows_what_ranks_hold_and_do(browser: Browser, group: LocalGroupProcess) -> None:
    async with opened(browser, group.record.http) as page:
        await say(page, LONG)
        await text_grows(page, 100)
        with group.admin() as admin:
            topology = admin.topology()
        for rank in topology.ranks:
            card = page.get_by_role("article", name=f"Rank {rank.rank}")
            await expect(card).to_contain_text(rank.device)
            assert rank.mlp_columns is not None
            await expect(card).to_contain_text(f"{rank.mlp_columns.size:,}")
            await expect(card.locator(".part", has_text="Decode")).to_contain_text("ms")
            vocabulary = card.locator(".part", has_text="Vocabulary").locator("rect")
            assert rank.head_rows is not None
            assert await vocabulary.get_attribute("x") == str(rank.head_rows.begin)
            assert await vocabulary.get_attribute("width") == str(rank.head_rows.size)
        assert topology.placement is not None
        table = page.get_by_role("region", name="Placements")
        for option in topology.placement.options:
            await expect(table).to_contain_text(option.name)
        await expect(table.locator("tr.chosen")).to_contain_text("in force")
        await expect(page.locator("#figures")).to_contain_text("1 running")


async def test_a_rank_is_killed_and_healed_while_the_page_shows_it(browser: Browser, group: LocalGroupProcess) -> None:
    async with opened(browser, group.record.http) as page, opened(browser, group.record.http, width=NARROW) as small:
        await small.get_by_role("tab", name="Group").click()
        await say(page, LONG)
        length = await text_grows(page, 40)
        with group.admin() as admin:
            epoch = admin.topology().epoch
        os.kill(group.record.processes["cpu-1"], signal.SIGKILL)
        for each in (page, small):
            await expect(each.locator("#banner")).to_contain_text("Healing", timeout=PATIENCE_MS)
        await keep(page, "healing")
        for each in (page, small):
            events = each.locator("#events")
            await expect(events).to_contain_text(f"Epoch {epoch + 1} is ready, after", timeout=PATIENCE_MS)
            await expect(events).to_contain_text(re.compile(r"Epoch \d+ is \w+: .*rank [01]"))  # why it ended
            await expect(each.locator("#banner")).to_be_hidden()
            await expect(each.locator("#state")).to_have_text("ready")
        await text_grows(page, length + 40)  # the same answer goes on
        assert await answers(page).count() == 1
        await keep(page, "healed")


async def test_a_keyboard_is_enough(browser: Browser, group: LocalGroupProcess) -> None:
    async with opened(browser, group.record.http, width=NARROW) as page:
        await page.get_by_role("tab", name="Chat").focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("tab", name="Group")).to_be_focused()
        await expect(page.get_by_role("heading", name="Ranks")).to_be_visible()
        await page.keyboard.press("/")
        await expect(page.get_by_role("textbox", name="Message")).to_be_focused()
        await page.keyboard.type("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two / three")
        await expect(page.get_by_role("textbox", name="Message")).to_have_value("one\ntwo / three")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Parameters")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("System prompt")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, WIDE])
async def test_nothing_is_cut_off_at_any_width(
    browser: Browser, group: LocalGroupProcess, width: int, scheme: Literal["light", "dark"]
) -> None:
    async with opened(browser, group.record.http, width=width, scheme=scheme) as page:
        await page.get_by_role("button", name="Parameters").click()
        await page.get_by_label("Max tokens").fill("60")
        await keep(page, f"parameters-{width}-{scheme}")
        await page.get_by_role("button", name="Parameters").click()
        await say(page, "Why is the sky blue?")
        await text_grows(page, 40)
        await check_fit(page, width)
        await keep(page, f"chat-{width}-{scheme}")
        if width == NARROW:
            await page.get_by_role("tab", name="Group").click()
        await expect(page.get_by_role("heading", name="Placement")).to_be_visible()
        await check_fit(page, width)
        await keep(page, f"group-{width}-{scheme}")
        await page.locator("#placement").evaluate("placement => placement.scrollIntoView()")
        await keep(page, f"placement-{width}-{scheme}")
        back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, back.removeprefix("rgb(").removesuffix(")").split(","))) < 200
        assert is_dark == (scheme == "dark")


async def check_fit(page: Page, width: int) -> None:
    """Nothing that is shown reaches beyond the window's right edge, or scrolls it sideways."""
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = await page.evaluate(
        """width => [...document.querySelectorAll("button, input, p, h2, .part, td, .figure")]
        .filter((each) => each.checkVisibility() && each.getBoundingClientRect().right > width)
        .map((each) => each.outerHTML)""",
        width,
    )
    assert beyond == []


async def keep(page: Page, name: str) -> None:
    """Keep a picture of the window where one is wanted."""
    folder = os.environ.get("HETERO_PAGE_PICTURES")
    if folder:
        await page.screenshot(path=Path(folder) / f"{name}.png")


# --- a scripted rank behind a real gateway ------------------------------------------------------------------

MARKUP = "<script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"


async def test_markup_from_a_model_is_text(browser: Browser, tmp_path: Path) -> None:
    model = served_model(tmp_path, model={"uri": "hf://org/model", "maxModelLen": 512})
    async with GatewayBench(model) as bench, opened(browser, bench.addresses.http) as page:
        rank, _ = await bench.join()
        rank.say(model.tokenizer.encode(MARKUP))
        await say(page, "<b>bold</b>")
        await expect(answers(page).locator(".meta")).to_be_visible(timeout=PATIENCE_MS)
        assert await answers(page).locator(".body").inner_text() == MARKUP
        assert await page.get_by_role("article", name="You").locator(".body").inner_text() == "<b>bold</b>"
        assert await page.locator("article script, article img, article b").count() == 0
        assert await page.title() == "g · HeteroInference"


async def test_the_policy_stops_scripts_that_get_into_the_document(browser: Browser, tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path)) as bench, opened(browser, bench.addresses.http) as page:
        script = """() => {
            const script = document.createElement("script");
            script.append("window.ran = true");
            document.body.append(script);
            return window.ran === undefined;
        }"""
        assert await page.evaluate(script)
        for write in ("document.body.innerHTML = '<p>'", "document.body.setAttribute('onclick', 'window.ran = true')"):
            assert (
                await page.evaluate(f"() => {{ try {{ {write} }} catch (error) {{ return error.name }} }}")
                == "TypeError"
            )
        elsewhere = "fetch('http://127.0.0.1:9/').then(() => 'went', (error) => error.name)"
        assert await page.evaluate(elsewhere) == "TypeError"


async def test_a_key_opens_the_chat_and_an_administrators_the_picture(browser: Browser, tmp_path: Path) -> None:
    files = AccessFiles.load(keys_file=write_keys(tmp_path / "keys.yaml", ENTRIES))
    async with (
        GatewayBench(served_model(tmp_path), files=files) as bench,
        opened(browser, bench.addresses.http) as page,
    ):
        rank, _ = await bench.join()
        rank.say(bench.model.tokenizer.encode("hi"))
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("asks for a key")
        await show_key(page, "wrong-key")
        await expect(dialog.get_by_role("alert")).to_contain_text("key of role user")
        await show_key(page, "a-key")
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#note")).to_contain_text("takes the role admin")
        await expect(page.locator("#picture")).to_be_hidden()
        await say(page, "hello")
        await expect(answers(page).locator(".body")).to_have_text("hi", timeout=PATIENCE_MS)
        await page.get_by_role("button", name="Key", exact=True).click()
        await show_key(page, "r-key")
        await expect(page.locator("#ranks")).to_contain_text("KV heads", timeout=PATIENCE_MS)
        kept = await page.evaluate(
            "[localStorage.length, sessionStorage.length, document.cookie, document.documentElement.outerHTML]"
        )
        assert kept[:3] == [0, 0, ""]
        assert "r-key" not in kept[3]
        assert await page.get_by_label("Key", exact=True).evaluate("input => input.value") == ""
        assert await page.evaluate("indexedDB.databases()") == []
        await page.reload()
        await expect(dialog).to_contain_text("asks for a key")


async def show_key(page: Page, key: str) -> None:
    await page.get_by_label("Key", exact=True).fill(key)
    await page.get_by_role("button", name="Use key").click()
