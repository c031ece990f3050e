"""Names that no file can have, wherever a folder is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyformer
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.core.errors import InputError
from polyformer.data import load_tokenizer
from polyformer.training.recipes.run import Run, is_checkpoint

READERS: list[Callable[[Any], object]] = [
    polyformer.from_pretrained,
    load_tokenizer,
    Run.open,
    is_checkpoint,
    open_reader,
    lambda name: open_folder(Path(name)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_name_that_is_none(read: Callable[[Any], object]):
    for name in ("x" * 5000, "x" * 300, "a\0b", "\ud800"):
        with pytest.raises(InputError, match=r"name is too long|expected the name of a file") as refused:
            read(name)
        assert len(str(refused.value)) < 400
    with pytest.raises(InputError, match="expected the name of a file or folder, got 5"):
        polyformer.from_pretrained(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["generate", "show", "evaluate", "train --data"])
def test_on_the_command_line(words: str, complaint: Callable[..., str]):
    assert "name is too long" in complaint(*words.split(), "x" * 5000)


def test_converting_into_a_file(tmp_path: Path, complaint: Callable[..., str]):
    text = tmp_path / "some.jsonl"
    text.write_text("{}")
    error = complaint("convert", tmp_path, text)
    assert f"OUT: expected a folder, or the name of a new one, got '{text}', which is a file" in error
