"""What stands where in the site: the parts of its contents, in the order in which they are read.

A page of `docs` that no part names appears under "More", so that a new page is never lost.
"""

import fnmatch

from member_pages import TITLES

PARTS: dict[str, list[str]] = {
    "Start": ["start"],
    "Tutorials": [
        "tutorials/translator",
        "tutorials/own_attention",
        "tutorials/kernels",
        "tutorials/memories",
        "tutorials/longer_texts",
        "tutorials/many_machines",
        "tutorials/transcript",
    ],
    "How-to": [
        "long_texts",
        "data",
        "models",
        "transformers",
        "runs",
        "cluster",
        "depth",
        "datastores",
        "agents",
        "explorer",
        "experiments",
        "benchmarks",
        "cli",
        "examples",
    ],
    "Members": ["members", "survey", "members/*/index", "patterns", "positions", "presets"],
    "Explanation": ["design", "errata"],
    "Reference": ["reference/api", "reference/cli", "reference/recipes", "results", "claims", "glossary"],
    "Tiếng Việt": ["vi/README", "vi/start", "vi/survey", "vi/tutorials/*", "vi/errata", "vi/glossary"],
    "Project": ["project/changelog", "project/contributing", "project/security", "screenshots"],
}

REPOSITORY = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples.md",
}
"""Pages that lie beside `docs`, and where they are in the site."""


HOME = {"README.md": "index.md"}
"""What the site has in the place of a file of the repository: links to it lead there."""


def contents(pages: set[str]) -> str:
    """The contents as Sphinx reads them, of those pages (names without an ending) that there are."""
    parts, named = [], set()
    for title, names in PARTS.items():
        listed: list[str] = []
        for name in names:
            listed += sorted(fnmatch.filter(pages, name), key=_place) if "*" in name else [name]
        parts.append((title, [page for page in listed if page in pages]))
        named |= set(listed)
    apart = ("members/", "reference/", "examples/", "index")
    parts.append(("More", sorted(page for page in pages - named if not page.startswith(apart))))
    return "\n\n".join(_contents(title, names) for title, names in parts if names)


def _place(page: str) -> tuple[int, str]:
    """Axes in the order of `TITLES`, everything else by name."""
    axes = [f"members/{axis.lower()}/index" for axis in TITLES]
    return axes.index(page) if page in axes else len(axes), page


def _contents(title: str, names: list[str]) -> str:
    lines = "\n".join(f"/{name}" for name in names)
    return f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```"
