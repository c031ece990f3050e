"""The conditions of a measurement: processor, instruction sets that torch may use, threads and versions."""

import functools
import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import polyformer
from polyformer.core.ops.tuning import description, processor

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
