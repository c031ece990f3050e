"""Rewrite links when pages are copied to the site, and check the links of the built pages.

`python docs/site/links.py FOLDER` lists all broken internal links of a built site, and all resources that a
page would load from other sites.
"""

import json
import posixpath
import re
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"(!?)\[((?:[^\]\[`]|`[^`]*`|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~)")


def rewritten(text: str, source: str, pages: dict[str, str], others: set[str]) -> str:
    """Return the text of the Markdown file `source` with links that work in the site.

    `pages` maps files of the repository to pages of the site; `others` are other files of the site. A link to
    a file outside the site is replaced by the path of the file in the repository.
    """
    here = posixpath.dirname(pages[source])

    def replaced(match: re.Match[str]) -> str:
        bang, label, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in pages:
            return f"{bang}[{label}]({posixpath.relpath(pages[target], here or '.')}{hash_}{anchor})"
        if target in others:
            relative = posixpath.relpath(target.removeprefix("docs/"), here or ".")
            return f"{bang}[{label}]({relative})"
        return label if label.strip("`") == target else f"{label} (`{target}`)"

    return "\n".join(part if code else LINK.sub(replaced, part) for code, part in parts(text)) + "\n"


def parts(text: str) -> list[tuple[bool, str]]:
    """Return the paragraphs of a text and its lines of code, each with whether it is code."""
    inside, result = False, []
    paragraph: list[str] = []
    for line in [*text.splitlines(), None]:
        fence = line is not None and bool(FENCE.match(line.lstrip()))
        if line is None or fence or inside or not line:
            # The label of a link may continue on the next line, but not in the next paragraph.
            result += [(False, "\n".join(paragraph))] if paragraph else []
            paragraph = []
            result += [] if line is None else [(True, line)]
            inside = inside != fence
        else:
            paragraph.append(line)
    return result


class Page(HTMLParser):
    """The links, the loaded resources and the anchors of a built page."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors and links of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        loaded = values.get("src") or (values.get("href") if tag == "link" else None)
        if loaded:
            self.fetched.append(loaded)


def broken(folder: Path) -> list[str]:
    """Return all broken internal links, and all external resources that a page would load."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    missing: dict[str, set[str]] = defaultdict(set)
    for path, page in pages.items():
        for link in {*page.links, *page.fetched}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.fetched and parts.scheme != "data":
                    missing[f"fetches {link}"].add(str(path.relative_to(folder)))
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else set()
            if not target.is_file() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in known
            ):
                missing[link].add(str(path.relative_to(folder)))
    return [f"{link}: in {', '.join(sorted(places)[:3])}" for link, places in sorted(missing.items())]


def answers(report: str) -> str:
    """Summarize Sphinx's report on links to other sites (one JSON object per line) in one line."""
    rows = [json.loads(line) for line in report.splitlines()]
    states = {row["uri"]: row["status"] for row in rows if row["uri"].startswith(("http:", "https:"))}
    silent = sum(state in ("broken", "timeout") for state in states.values())
    network = "; is there a network?" if silent and silent == len(states) else ""
    return f"{len(states)} addresses of other sites, {silent} without an answer{network}"


def main(arguments: list[str]) -> int:
    """Print all broken links; return status 1 if there are any."""
    folder = Path(arguments[0]).resolve()
    lines = broken(folder)
    number = len(list(folder.rglob("*.html")))
    print("\n".join([*lines, f"{number} pages, {len(lines)} broken links"]))
    return 1 if lines or not number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
