"""Find the Chromium that the browser tests drive; run as a program, install it if there is none."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
PLAYWRIGHT = (sys.executable, "-m", "playwright", "install", "chromium")
PACKAGE_MANAGERS = {
    "apt-get": ("sh", "-c", "apt-get update && apt-get install -y --no-install-recommends chromium"),
    "dnf": ("dnf", "install", "-y", "chromium"),
    "apk": ("apk", "add", "chromium"),
    "pacman": ("pacman", "-S", "--noconfirm", "chromium"),
}
HOW = "apt-get install chromium, or .venv/bin/playwright install chromium"


@functools.cache
def find_browser() -> str | None:
    """Return the path of an installed Chromium: the system's, else playwright's; None if there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright  # tests without a browser do not need the package

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def install_browser() -> None:
    """Try playwright's download, then the system's package manager, until a browser is found."""
    commands = [PLAYWRIGHT]
    if os.geteuid() == 0:  # a package manager needs root, and a test suite asks for no password
        commands += [command for name, command in PACKAGE_MANAGERS.items() if shutil.which(name)]
    for command in commands:
        if find_browser() is not None:
            return
        print(f"installing Chromium: {' '.join(command)}", flush=True)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
        find_browser.cache_clear()
    if find_browser() is None:
        print(f"no Chromium could be installed, so the browser tests will not run; {HOW}")


if __name__ == "__main__":
    install_browser()
