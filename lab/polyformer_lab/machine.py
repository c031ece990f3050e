"""This machine: the conditions of a measurement, and the paths of data sets and checkpoints by name.

Conditions are the processor, instruction sets that torch may use, threads and versions.
"""

import dataclasses
import functools
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import polyformer
from polyformer.core.errors import InputError, unknown
from polyformer.core.ops.tuning import description, processor
from polyformer.training.recipes.recipe import absolute, with_data

PACKAGES = (
    *("transformers", "ctranslate2", "llama-cpp-python", "local-attention", "performer-pytorch"),
    *("reformer-pytorch", "routing-transformer", "linformer", "x-transformers", "torchao", "numpy"),
)
"""Packages that take part in measurements, or that their computations use."""


def begin(threads: int | None) -> None:
    """Set torch's number of threads if one is requested, and print the machine in one line."""
    if threads is not None:
        torch.set_num_threads(threads)
    facts, installed = description(), versions()
    place = f"{facts['processor']}, {facts['cores']} cores, {facts['instruction set']}"
    if torch.cuda.is_available():
        place += f", {torch.cuda.get_device_name()}"
    others = "".join(
        f", {name} {installed[name]}" for name in ("transformers", "ctranslate2") if name in installed
    )
    print(
        f"{place}; {torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, polyformer {facts['polyformer']}{others}"
    )


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    found_versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("polyformer", *PACKAGES):
        try:
            found_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found_versions


@functools.cache
def code_version() -> str:
    """Return the version of this package; in a repository also the commit, and whether files differ from
    it.
    """
    source = Path(polyformer.__file__).parent
    text = f"polyformer {description()['polyformer']}"
    try:
        top = _git(source, "rev-parse", "--show-toplevel")
        if Path(top, "src", "polyformer").resolve() != source.resolve():
            return text
        changed = ", changed" if _git(source, "status", "--porcelain", ".") else ""
        return f"{text}, commit {_git(source, 'rev-parse', '--short', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return text


def run_facts() -> dict[str, str | int]:
    """Return the date, the processor, the threads and the code of a run."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "code": code_version(),
    }


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class Source:
    """The description of a source, and the way in which a recipe reads it."""

    title: str
    data: Mapping[str, Any] | None = None


SOURCES = {
    "wikitext2": Source(
        "WikiText-2: a directory with {train,valid,test}.txt[.gz]",
        {"path": "train.txt.gz", "validation": "valid.txt.gz", "format": "articles"},
    ),
    "sst2": Source("SST-2: a directory with {train,test}.tsv[.gz]: text, label"),
    "imdb": Source("IMDB: a directory with {train,test}.tsv[.gz]: label, rating, text"),
    "multi30k": Source(
        "Multi30k: a directory with {train,val,test_2016_flickr}.{en,de}.gz",
        {"path": "train.{en,de}.gz", "validation": "val.{en,de}.gz", "test": "test_2016_flickr.{en,de}.gz"},
    ),
    "mnist": Source("MNIST's images: an IDX file, mnist/t10k-images-idx3-ubyte.gz"),
    "book": Source("a book with chapters: a text file, book.txt[.gz]"),
    "decoder": Source("the folder of a checkpoint that writes, with rotary positions"),
    "encoder": Source("the folder of an encoder of sentences"),
    "exits": Source("the folder of a checkpoint with exits (polyformer convert --depth exits(...) --fit)"),
}

NAME = re.compile(r"\$(\w+)")
ENDINGS = {"book": (".txt", ".txt.gz"), "mnist": ("/t10k-images-idx3-ubyte.gz",)}


class Sources:
    """The paths of the sources of a study.

    Args:
        needs: "required" or "optional" by name.
        root: a folder with a file or folder for each source; for a study with one source also the source
            itself.
        named: paths by name, which come first.

    Raises:
        InputError: a named path does not exist, or a name is unknown.
    """

    def __init__(self, needs: Mapping[str, str], root: str | None, named: Mapping[str, str | None]):
        self.needs, self.places = needs, dict[str, str]()
        for name in needs:
            if name not in SOURCES:
                raise unknown("source in needs", name, SOURCES)
            path = named.get(name)
            if path is not None and not Path(path).exists():
                raise InputError(f"{name}: no such file or folder: {path}")
            inside = [Path(root, name + ending) for ending in ENDINGS.get(name, ("",))] if root else []
            there = [Path(path)] if path is not None else [place for place in inside if place.exists()]
            if not there and root and len(needs) == 1:
                there = [Path(root)]
            if there:
                self.places[name] = str(there[0].absolute())

    @property
    def lacks(self) -> str:
        """Return a description of the required sources that are missing; "" for none."""
        absent = [name for name, kind in self.needs.items() if kind == "required" and name not in self.places]
        return "; ".join(f"{name} ({SOURCES[name].title})" for name in absent)

    def fill(self, text: str) -> str | None:
        """Return the text with the path of each `$name`; None if the text is only an absent source's name."""
        if text.removeprefix("$") in self.needs and text.startswith("$") and text[1:] not in self.places:
            return None
        return NAME.sub(lambda match: self.places.get(match[1], match[0]), text)

    def data(self, name: str) -> dict[str, Any]:
        """Return the `data` of a recipe that reads the source `name`; if it is absent, the default text."""
        source = SOURCES.get(name)
        if source is None or source.data is None:
            texts = [known for known, each in SOURCES.items() if each.data is not None]
            raise unknown("source of data", name, texts)
        place = self.places.get(name)
        return {} if place is None else absolute(with_data(dict(source.data), place))
