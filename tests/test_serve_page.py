"""The page in a real browser: a query is typed, results appear, a click shows where the heads look."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CAPTIONS
from test_serve import index, png

from vlretrieval.deploy.index.opened import Index

__all__ = ["index"]  # the fixture

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("playwright", reason="playwright, of the extra 'dev', is not installed")


@pytest.fixture(scope="module")
def address(index: Index) -> Iterator[str]:
    import uvicorn

    from vlretrieval.deploy.serve.app import make_app

    app = make_app(index, loopback="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_query_is_answered_and_a_click_shows_where_the_heads_look(
    chromium: Any, address: str, index: Index, width: int
) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 800})
    page.set_default_timeout(20_000)
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.get_by_label("Search 13 pictures").fill(CAPTIONS[0])
    page.keyboard.press("Enter")
    page.wait_for_selector(".card img[src]")
    expected = index.search(CAPTIONS[0], top=24)
    cards = page.locator(".card")
    assert [cards.nth(i).get_attribute("data-id") for i in range(cards.count())] == [hit.id for hit in expected]
    said = cards.nth(0).inner_text()
    assert f"cosine {expected[0].cosine:.3f}" in said and f"match {expected[0].match:.2f}" in said
    assert re.search(r"(from \d+|as by cosine)", said)
    assert "13 of 13, re-ranked" in page.locator("#status").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"

    page.get_by_label("by cosine").check()
    by_cosine = sorted(expected, key=lambda hit: hit.place)
    assert [cards.nth(i).get_attribute("data-id") for i in range(13)] == [hit.id for hit in by_cosine]

    cards.nth(0).click()
    page.wait_for_selector("#heat[data-painted='0/-1']:visible")
    assert page.locator("#words button").all_inner_texts() == ["whole text", *CAPTIONS[0].split()]
    assert page.locator("#heads button").count() == 6
    whole = page.evaluate("document.getElementById('heat').toDataURL()")
    page.locator("#words").get_by_text("red", exact=True).click()
    page.wait_for_selector("#heat[data-painted='0/1']")
    assert "“red” looks at" in page.locator("#explain").inner_text()
    one_word = page.evaluate("document.getElementById('heat').toDataURL()")
    page.locator("#heads button").nth(1).click()
    page.wait_for_selector("#heat[data-painted='1/1']")
    other_head = page.evaluate("document.getElementById('heat').toDataURL()")
    assert len({whole, one_word, other_head}) == 3, "each word and each head has a picture of its own"
    assert page.evaluate("document.getElementById('view').scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    assert not page.locator("#view").is_visible()

    page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png()})
    page.locator("#status", has_text="by cosine").wait_for()
    page.locator("#file").set_input_files({"name": "b.png", "mimeType": "image/png", "buffer": b"none"})
    page.wait_for_selector("#status.error")
    assert "the picture cannot be used" in page.locator("#status").inner_text()
    assert all(url.startswith((address, "data:", "blob:")) for url in asked)
    refused = [error for error in errors if "422" not in error]  # the bad upload just now
    assert refused == []
    page.close()


def test_the_page_asks_for_the_token(chromium: Any, index: Index) -> None:
    import uvicorn

    from vlretrieval.deploy.serve.app import make_app

    config = uvicorn.Config(make_app(index, token="secret"), port=0, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    page = chromium.new_page()
    page.set_default_timeout(20_000)
    page.on("dialog", lambda dialog: dialog.accept("secret"))
    page.goto(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    page.get_by_label("Search 13 pictures").fill("a star")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card img[src]")
    page.close()
    server.should_exit = True
    thread.join(20)


def test_the_browser_was_found() -> None:
    assert BROWSER is not None and Path(BROWSER).exists()
