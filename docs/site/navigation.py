"""The table of contents of the site: its parts and their pages in reading order.

A page of `docs` that is not listed appears under "More".
"""

import fnmatch

from member_pages import TITLES

PACKAGES = ["core", "data", "attention", "nn", "models", "training", "applications", "cli"]
"""The packages, in the order of their imports; each has a page of the design."""

PARTS: dict[str, list[str]] = {
    "Start": ["start"],
    "Tutorials": [
        "examples/plain_transformer",
        "tutorials/translator",
        "tutorials/positions",
        "tutorials/own_attention",
        "tutorials/memories",
        "tutorials/longer_texts",
        "tutorials/kernels",
        "tutorials/many_machines",
    ],
    "How-to": [
        "own_mechanism",
        "long_texts",
        "data",
        "models",
        "transformers",
        "runs",
        "trained_models",
        "chat",
        "cluster",
        "depth",
        "diffusion",
        "datastores",
        "agents",
        "explorer",
        "interventions",
        "audit",
        "experiments",
        "benchmarks",
        "cli",
        "examples",
    ],
    "Members": ["members", "survey", "members/*/index", "patterns", "positions", "presets"],
    "Explanation": ["design", *(f"design/{package}" for package in PACKAGES), "errata", "seeds"],
    "Reference": ["reference/api", "reference/cli", "reference/recipes", "claims", "glossary"],
    "Results": ["results", "results/*"],
    "Tiếng Việt": [
        "vi/README",
        "vi/start",
        "vi/survey",
        "vi/tutorials/translator",
        "vi/tutorials/positions",
        "vi/tutorials/own_attention",
        "vi/tutorials/memories",
        "vi/tutorials/longer_texts",
        "vi/tutorials/kernels",
        "vi/tutorials/many_machines",
        "vi/errata",
        "vi/seeds",
        "vi/glossary",
    ],
    "Project": ["project/changelog", "project/contributing", "project/security", "screenshots"],
}

REPOSITORY = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples.md",
}
"""Pages outside `docs`, with their paths in the site."""


HOME = {"README.md": "index.md"}
"""Files of the repository that the site replaces by another page; links to them lead there."""


def contents(pages: set[str]) -> str:
    """Return the table of contents for Sphinx. `pages`: names of the existing pages without suffix."""
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
    """Return a sort key: axes in the order of `TITLES`, other pages by name."""
    axes = [f"members/{axis.lower()}/index" for axis in TITLES]
    return axes.index(page) if page in axes else len(axes), page


def _contents(title: str, names: list[str]) -> str:
    lines = "\n".join(f"/{name}" for name in names)
    return f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```"
