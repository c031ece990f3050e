"""The explorer's script and style in the package are those of the sources in `explorer/`."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES, BUNDLE = ROOT / "explorer", ROOT / "src" / "polyformer" / "cli" / "plots" / "explorer"
LOCK = json.loads((BUNDLE / "explorer.lock.json").read_text(encoding="utf-8"))


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """What `explorer/build.mjs` writes down: sha256 of paths and contents, in the order of the paths."""
    total = hashlib.sha256()
    for path, content in sorted(files):
        total.update(path.encode() + b"\0" + content + b"\0")
    return total.hexdigest()


def sources() -> list[tuple[str, bytes]]:
    files = [SOURCES / name for name in ("build.mjs", "package-lock.json", "package.json", "tsconfig.json")]
    files += [file for file in (SOURCES / "src").rglob("*") if file.is_file()]
    return [(file.relative_to(SOURCES).as_posix(), file.read_bytes()) for file in files]


def test_the_bundle_is_made_of_the_sources():
    assert LOCK["sources"] == digest(sources()), "explorer/ has changed: run 'make explorer' and commit"


@pytest.mark.parametrize("name", ["explorer.css", "explorer.js", "figures.js"])
def test_the_bundle_is_as_it_was_built(name: str):
    content = (BUNDLE / name).read_bytes()
    assert LOCK[name] == hashlib.sha256(content).hexdigest(), "run 'make explorer' and commit"


def test_a_changed_source_would_be_noticed():
    (path, content), *others = sources()
    assert digest([(path, content + b" "), *others]) != LOCK["sources"]


def test_files_of_sources_are_short():
    lengths = {path: content.count(b"\n") for path, content in sources() if path.endswith(".ts")}
    assert max(lengths.values()) <= 350, lengths
