"""A directory of data as people have it: which files are trained on, and what is left out and said."""

from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.data.formats.columns import content_roles
from polyformer.data.formats.directories import choose_files
from polyformer.data.formats.guess import guess
from polyformer.data.sources.origins import folder_rows, open_source, source_files

STRAY = (
    "README",
    "README.txt",
    "LICENSE.txt",
    "_about.txt",
    "terms.txt",
    "SHA256SUMS",
    "data.md5",
    ".DS_Store",
    "Thumbs.db",
)


@pytest.mark.parametrize(
    ("files", "sources"),
    [
        (["war.txt.gz"], {"path": "war.txt.gz"}),
        (["a.txt", "b.txt"], {"path": "*.txt"}),
        (["x.en.json", "x.vi.json"], {"path": "*.json"}),
        (["tst.en", "tst.vi"], {"path": "tst.{en,vi}"}),
        (
            ["train.en.gz", "train.vi.gz", "val.en", "val.vi"],
            {"path": "train.{en,vi}.gz", "validation": "val.{en,vi}"},
        ),
        (
            ["vi-ud-train.conllu", "vi-ud-dev.conllu", "vi-ud-test.conllu"],
            {"path": "vi-ud-train.conllu", "validation": "vi-ud-dev.conllu", "test": "vi-ud-test.conllu"},
        ),
        (
            ["wnut17train.conll", "new.dev.conll", "new.test.annotated"],
            {"path": "wnut17train.conll", "validation": "new.dev.conll", "test": "new.test.annotated"},
        ),
        (["training.csv", "train-images.txt"], {"path": "training.csv"}),
        (["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"], {"path": "t10k-images-idx3-ubyte.gz"}),
        (
            ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"],
            {"path": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_files_that_come_along_with_data_are_left_out(
    tmp_path: Path, files: list[str], sources: dict[str, str]
):
    for name in (*files, *STRAY):
        (tmp_path / name).touch()
    chosen = choose_files(tmp_path)
    assert chosen.sources == {role: f"{tmp_path}/{name}" for role, name in sources.items()}
    assert {*STRAY} - {".DS_Store"} <= {*chosen.left_out}
    assert not {*sources.values()} & {*chosen.left_out}
    assert not [name for name in chosen.left_out if "labels" in name], "read with the images"


def test_notices_are_no_part_of_a_table(tmp_path: Path):
    (tmp_path / "vie.txt").write_text("".join(f"I have {i}.\tTôi có {i}.\n" for i in range(50)))
    (tmp_path / "where from.txt").write_text("Sentences of a collection.\nCC BY 2.0\n")
    guessed = guess(str(tmp_path), {})
    assert (guessed.data["path"], guessed.kind) == (str(tmp_path / "vie.txt"), "translate")
    assert "left out: where from.txt (--data FILE trains on another file)" in guessed.said
    (tmp_path / "more.txt").write_text("Run!\tChạy!\n" * 5)
    with pytest.raises(InputError, match=r"from\.txt has no columns, unlike more\.txt; move it"):
        choose_files(tmp_path)


def test_a_pattern_leaves_out_what_is_left_out(tmp_path: Path):
    for name in ("a.txt", "b.txt", "README.txt", "_about.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    pattern = guess(str(tmp_path), {}).data["path"]
    assert [row["text"].strip() for row in open_source(pattern, "train")] == ["a.txt", "b.txt"]
    assert [path.name for path in source_files(pattern)] == ["a.txt", "b.txt"]
    assert [row["text"] for row in open_source(f"{tmp_path}/README.t*", "train")] == ["README.txt\n"]


def test_a_small_table_is_a_text_among_texts(tmp_path: Path):
    (tmp_path / "chapter.txt").write_text("It was a dark and stormy night.\n" * 50)
    (tmp_path / "contents.txt").write_text("Chapter\t1\n")
    assert choose_files(tmp_path).sources == {"path": f"{tmp_path}/*.txt"}


def test_files_that_are_left_out_are_named(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("a few words\n")
    (tmp_path / "README").write_text("about the notes\n")
    guessed = guess(str(tmp_path), {})
    assert guessed.data["path"] == str(tmp_path / "notes.txt")
    assert "left out: README (--data FILE trains on another file)" in guessed.said


def test_several_kinds_of_data_are_asked_about(tmp_path: Path):
    for name in ("README", "ids.tsv", "a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"cannot tell what to train on .* has README, a\.txt, b\.txt, ids"):
        choose_files(tmp_path)


def test_folders_per_label_may_have_stray_files(tmp_path: Path):
    for label in ("good", "bad"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.txt").write_text(f"a {label} film")
        (tmp_path / label / "Thumbs.db").write_bytes(b"\0")
    (tmp_path / "README.md").touch()
    rows = [{"text": "a bad film", "label": "bad"}, {"text": "a good film", "label": "good"}]
    assert list(folder_rows(tmp_path)) == rows


def test_patterns_of_files_are_looked_at_as_files_are(tmp_path: Path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("a fine film;1\ndull;0\nso fine;1\nso dull;0\n")
    guessed = guess(f"{tmp_path}/*.csv", {})
    assert guessed.data["header"] == ["text", "label"]
    assert guessed.kind == "classify"


def test_columns_beside_text_and_label_are_known():
    reviews = [
        (f"{i}_{i % 4}", str(i % 2), str(i % 4), f"review {i}, which is a long one") for i in range(16)
    ]
    assert content_roles(reviews) == ["id0", "label", "other2", "text"]
    assert content_roles([row[1:] for row in reviews]) == ["label", "other1", "text"]
    assert content_roles([(row[0], row[3]) for row in reviews]) == ["id0", "text"]
    alike = [(label, label, text) for _, label, _, text in reviews]
    assert content_roles(alike) is None
