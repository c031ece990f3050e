"""One checkpoint and one store for all tests of a worker."""

from pathlib import Path

import pytest
from tiny_stores import TEXT, built, tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousands of bytes."""
    file = tmp_path_factory.mktemp("text") / "bottles.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def store(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text's store, not to be changed."""
    return built(checkpoint, text, tmp_path_factory.mktemp("store") / "store")
