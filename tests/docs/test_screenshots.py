"""Pictures of the explorer and of the site: one of each that the script takes, small, and shown on a page."""

import pytest
from screenshots import EXPLORER, PAGES, ROOT, SITE, VIEWS

LIMIT, ALL = 150_000, 3_000_000
WANTED = {
    "docs/explorer.md": (EXPLORER, set(VIEWS)),
    "docs/screenshots.md": (SITE, {f"{name}{theme}" for name in PAGES for theme in ("", "-dark")}),
}


@pytest.mark.parametrize("page", WANTED)
def test_pictures_are_those_of_the_script_and_stand_on_a_page(page: str):
    folder, names = WANTED[page]
    pictures = {path.stem: path.stat().st_size for path in folder.glob("*.png")}
    assert set(pictures) == names
    assert max(pictures.values()) < LIMIT
    text = (ROOT / page).read_text(encoding="utf-8")
    assert all(f"({folder.name}/{name}.png)" in text for name in names)


def test_all_pictures_together_are_small():
    sizes = [path.stat().st_size for folder, _ in WANTED.values() for path in folder.glob("*.png")]
    assert sum(sizes) < ALL
