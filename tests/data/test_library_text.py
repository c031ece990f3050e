"""The sources of Python's library as a text: the same at every call, in whole files, in any installation."""

import sysconfig
from pathlib import Path

import pytest

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, load
from polyformer.data.sources.libraries import CHARACTERS, LIBRARY, library_documents, library_files
from polyformer.data.sources.origins import source_files


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_is_whole_files_of_about_two_million_characters():
    files, documents = library_files(), library_documents()
    assert files == library_files() == source_files(LIBRARY)
    assert 0.9 * CHARACTERS < sum(map(len, documents)) < 1.1 * CHARACTERS
    assert len(set(documents)) == len(documents) == len(files) > 50
    assert documents[7] == files[7].read_text(encoding="utf-8", errors="replace")
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == sorted(names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_held_out_files_are_no_training_files():
    splits = load(DataConfig(path=LIBRARY), ("text",))
    assert splits.validation is not None
    train, held_out = set(splits.train["text"]), set(splits.validation["text"])
    assert not train & held_out
    assert train | held_out == set(library_documents())


def test_modules_may_be_missing_and_what_is_no_source_to_read_is_left_out(library: Path):
    for name in (
        "b.py",
        "a/z.py",
        "a/test/c.py",
        "site-packages/d.py",
        "config-3/e.py",
        "_sysconfigdata_f.py",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    (library / "empty.py").touch()
    assert library_documents() == ["# a/z.py\n", "# b.py\n"]


def test_a_python_without_its_sources(library: Path):
    with pytest.raises(InputError, match=r"without the sources of its library.*--data PATH"):
        library_documents()
