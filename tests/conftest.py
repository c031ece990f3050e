"""Shared by all tests: where real data lies, if this machine has it."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

import nights
from browsers import HOW, find_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NO_BROWSER = f"browser tests: not run, because no Chromium is installed; {HOW}"

# The suite runs a process for each core: threads of their own would only wait for one another.
torch.set_num_threads(1)

# For devices that are not there torch.manual_seed keeps a stack trace a call: more work than many a test.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None


gc.disable()  # until the tests are collected: imports and tests stay to the end


def pytest_configure(config: pytest.Config) -> None:
    """Let `nights` choose the tests."""
    config.pluginmanager.register(nights)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage seldom, and never among the imports and the collected tests, which stay to the end.

    With the thresholds of the interpreter it takes a fifth of the time of tests that trace graphs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the browser tests if this machine has no browser; the last line of the run says so."""
    in_browser = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    if in_browser and find_browser() is None:
        for item in in_browser:
            item.add_marker(pytest.mark.skip(reason=NO_BROWSER))


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """A Chromium; a process may have only one, as playwright's loop of events runs until the end."""
    from playwright.sync_api import sync_playwright  # tests without a browser do not need the package

    path = find_browser()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line that the browser tests did not run, and how to install a browser."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any(NO_BROWSER in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(NO_BROWSER)


settings.register_profile("fuzz", max_examples=2000)  # of `make fuzz`: see tests/fuzz
settings.register_profile("night", max_examples=400)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("multi30k")`: the folder of a real data set; skips the test where there is none.

    Looked for in `$POLYFORMER_DATA`, else in `shared/data` beside the checkout.
    """
    root = Path(os.environ.get("POLYFORMER_DATA", Path(__file__).parents[2] / "shared" / "data"))

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no data set {name!r} under {root}")
        return root / name

    return folder


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`complaint(*words)`: the one line that a command says that ends with an error."""

    def run(*words: object) -> str:
        from polyformer.cli.main import main

        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("polyformer: error: ")
        assert error.count("\n") == 1
        return error

    return run
