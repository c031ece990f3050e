"""A small saved checkpoint, and a copy of it to damage."""

import shutil
from pathlib import Path

import pytest
from damage import SIZES

from polyformer.models.presets import create_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small BERT as transformers would have saved it."""
    folder = tmp_path_factory.mktemp("bert")
    create_model("bert-base", **SIZES).save_pretrained(folder, format="hub")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))
