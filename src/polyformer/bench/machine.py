"""What figures are worth nothing without: the processor, what torch may use of it, threads and versions."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from polyformer.ops.tuning.machine import described

PACKAGES = (
    *("transformers", "ctranslate2", "llama-cpp-python", "local-attention", "performer-pytorch"),
    *("reformer-pytorch", "routing-transformer", "linformer", "x-transformers", "torchao", "numpy"),
)
"""Packages that take part in measurements, or compute in them."""


def begin(threads: int | None) -> None:
    """Set torch's number of threads where one is wanted, and print the machine in one line."""
    if threads is not None:
        torch.set_num_threads(threads)
    facts, installed = described(), versions()
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
    """The versions of what is installed."""
    found_versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("polyformer", *PACKAGES):
        try:
            found_versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found_versions


def code_version() -> str:
    """The version of this package; where it lies in its repository, the commit, and whether it differs."""
    source = Path(__file__).parents[1]
    text = f"polyformer {described()['polyformer']}"
    try:
        top = _git(source, "rev-parse", "--show-toplevel")
        if Path(top, "src", "polyformer").resolve() != source.resolve():
            return text
        changed = ", changed" if _git(source, "status", "--porcelain", ".") else ""
        return f"{text}, commit {_git(source, 'rev-parse', '--short', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return text


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
