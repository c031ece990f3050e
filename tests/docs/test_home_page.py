"""The home page in a browser: a Vietnamese one starts in Vietnamese, once, and a link is always there."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Browser

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the home page, as the site's Markdown makes it, and a page in Vietnamese."""
    folder = tmp_path_factory.mktemp("site")
    home = MarkdownIt("commonmark").render((DOCS / "site" / "index.md").read_text(encoding="utf-8"))
    (folder / "index.html").write_text(f"<!DOCTYPE html><title>home</title>{home}", encoding="utf-8")
    (folder / "vi").mkdir()
    back = '<!DOCTYPE html><title>vi</title><a href="../index.html">English</a>'
    (folder / "vi" / "README.html").write_text(back, encoding="utf-8")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *message: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    server.server_close()


def test_a_vietnamese_browser_starts_in_vietnamese_the_first_time(site: str, browser: Browser):
    context = browser.new_context(locale="vi-VN")
    page = context.new_page()
    page.goto(site)
    page.wait_for_url("**/vi/README.html")
    page.click("text=English")
    page.wait_for_url("**/index.html")
    page.reload()
    assert page.title() == "home", "the reader's own way is kept"
    context.close()


@pytest.mark.parametrize("locale", ["en-US", "de-DE"])
def test_other_browsers_stay_and_have_the_link(site: str, browser: Browser, locale: str):
    context = browser.new_context(locale=locale)
    page = context.new_page()
    page.goto(site)
    page.wait_for_timeout(100)
    assert page.title() == "home"
    page.click(".languages a[lang=vi]")
    page.wait_for_url("**/vi/README.html")
    context.close()


def test_without_scripts_the_link_is_there(site: str, browser: Browser):
    context = browser.new_context(locale="vi-VN", java_script_enabled=False)
    page = context.new_page()
    page.goto(site)
    page.click(".languages a[lang=vi]")
    assert page.url.endswith("/vi/README.html")
    context.close()
