"""The explorer's pages in a real browser, without a network."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`opened(path, "view=matrix")`: the page, offline; nothing may be asked for, said or complained of."""
    contexts, events = [], []

    def open_page(path: Path, place: str = "", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        context.set_offline(True)
        address = path.as_uri()

        def asked(route: Any) -> None:
            if route.request.url.split("#")[0] == address:
                return route.continue_()
            events.append(f"request: {route.request.url}")
            route.abort()

        context.route("**/*", asked)
        tab = context.new_page()
        tab.on("console", lambda message: events.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: events.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (events.append("dialog"), dialog.dismiss()))
        tab.goto(f"{address}#{place}")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not events
