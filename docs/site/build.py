"""Build the site into build/site/html: `python docs/site/build.py [--external]`.

The site contains the pages of `docs` and `examples`, and pages generated from the registry, the docstrings,
the parsers and the recipes. Warnings are errors, nothing is downloaded, and all internal links are checked.
`--external` checks the links to other sites instead and needs a network.
"""

import os
import shutil
import sys
from pathlib import Path

import member_pages
import reference_pages
import survey_page
from links import answers, rewritten
from links import main as check_links
from navigation import HOME, REPOSITORY, contents
from notebooks import names as notebook_names
from notebooks import notebook
from translations import tutorial as translated_tutorial
from tutorials import page as tutorial_page

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
BUILD = ROOT / "build" / "site"
APART = ("site/", "members/")
"""Folders of `docs` that contain no complete pages."""


def sources() -> dict[str, str | Path]:
    """Return every source file of the site by its path: a text, or a file to copy."""
    docs = ROOT / "docs"
    files = [path for path in sorted(docs.rglob("*")) if path.is_file()]
    names = [(path, path.relative_to(docs).as_posix()) for path in files]
    names = [(path, name) for path, name in names if not name.startswith(APART)]
    pages = {f"docs/{name}": name for path, name in names if path.suffix == ".md"}
    pages |= {f"docs/{name}": f"{name[:-3]}.md" for path, name in names if path.suffix == ".py"}
    pages |= {name: page for name, page in REPOSITORY.items() if (ROOT / name).is_file()}
    others = {f"docs/{name}" for path, name in names if path.suffix in (".svg", ".png", ".html")}
    result: dict[str, str | Path] = {name.removeprefix("docs/"): ROOT / name for name in others}
    generated = generated_pages()
    pages |= {f"docs/{name}": name for name in generated}
    examples = {f"examples/{path.name}": path for path in sorted((ROOT / "examples").glob("*.py"))}
    pages |= {name: f"{name[:-3]}.md" for name in examples}
    for source, page in pages.items():
        if source in examples:
            text = example(examples[source])
        elif source.endswith(".py"):
            text = tutorial_page(Path(source).stem)
        elif source.startswith("docs/vi/tutorials/"):
            text = translated_tutorial(ROOT / source)
        else:
            text = generated.get(page) or (ROOT / source).read_text(encoding="utf-8")
        result[page] = rewritten(text, source, HOME | pages, others)
    result |= {f"tutorials/{name}.ipynb": notebook(name) for name in notebook_names()}
    index = (SITE / "index.md").read_text(encoding="utf-8")
    result["index.md"] = f"{index}\n{contents({name[:-3] for name in result if name.endswith('.md')})}\n"
    return result


def example(path: Path) -> str:
    """Return the page of an example program; the page of all examples links to it."""
    code = path.read_text(encoding="utf-8").rstrip()
    return f"---\norphan: true\n---\n\n# {path.name}\n\n[All examples](README.md)\n\n```python\n{code}\n```\n"


def generated_pages() -> dict[str, str]:
    """Return the pages generated from the code, as Markdown by path."""
    members = (ROOT / "docs" / "members.md").read_text(encoding="utf-8")
    result = {"members.md": member_pages.with_links(members), "survey.md": survey_page.page()}
    return result | member_pages.pages() | reference_pages.pages()


def assemble(folder: Path) -> None:
    """Write the sources that changed, so that Sphinx only reads these again."""
    wanted = {folder / name: content for name, content in sources().items()}
    for path in [path for path in folder.rglob("*") if path.is_file() and path not in wanted]:
        path.unlink()
    for path, content in wanted.items():
        data = content.encode() if isinstance(content, str) else content.read_bytes()
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def main(arguments: list[str]) -> int:
    """Return the exit status of Sphinx, or of the link check."""
    from sphinx.cmd.build import main as sphinx

    source, html = BUILD / "source", BUILD / "html"
    assemble(source)
    external = "--external" in arguments
    builder, out = ("linkcheck", BUILD / "linkcheck") if external else ("html", html)
    if not external:
        shutil.rmtree(html, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-j", os.environ.get("SITE_PROCESSES", "1")]
    status = sphinx(
        [*options, "-b", builder, "-c", str(SITE), "-d", str(BUILD / "doctrees"), str(source), str(out)]
    )
    if external:
        print(answers((out / "output.json").read_text(encoding="utf-8")))
        return status
    return status or check_links([str(html)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
