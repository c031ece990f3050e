"""Prepared text: the tokenizer's tokens, whatever the number of workers and however often it was killed.

`KILLS=50 pytest tests/data/test_prepared_text.py` kills so often.
"""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from forking import processes
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data.formats.readers import PIECE
from polyformer.data.prepared import MANIFEST, Manifest, PreparedFolder, Settings, preparing
from polyformer.data.prepared.preparing import pieces
from polyformer.data.sources.held_out import select_rows
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

KILLS = int(os.environ.get("KILLS", "3"))

TEXTS = [f"document {number} says {'tiếng Việt ' * (number % 7)}and little else" for number in range(400)]


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """A file with a part of the texts in each of two formats, and one that is empty."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS[:150])
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.csv").write_text("number,body\n" + "".join(f"1,{text}\n" for text in TEXTS[150:]))
    return [str(tmp_path / "*.jsonl"), str(tmp_path / "c.csv")]


def new_folder(folder: Path, **settings) -> tuple[Path, Settings]:
    """A folder with a tokenizer alone."""
    config = TokenizerConfig(algorithm="bpe", vocab_size=300)
    Tokenizer.train(config, TEXTS).save(folder / "tokenizer")
    fingerprint = load_tokenizer(folder / "tokenizer").fingerprint
    options = {"column": "body", "validation": 0.1, "shard_tokens": 500, **settings}
    return folder, Settings(tokenizer=fingerprint, **options)


def prepared(folder: Path, sources: list[str], workers: int = 2, **settings) -> dict[str, bytes]:
    """What prepare writes."""
    folder, chosen = new_folder(folder, **settings)
    preparing.prepare(sources, chosen, folder, workers, print)
    return content(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_tokens_are_those_of_the_texts(sources: list[str], tmp_path: Path):
    files = prepared(tmp_path / "P", sources, 1)
    assert len([name for name in files if name.endswith(".tokens")]) > 6
    folder = PreparedFolder(tmp_path / "P")
    folder.verify()
    rows = [{"text": text} for text in TEXTS]
    for name, held in (("train", False), ("validation", True)):
        texts = [row["text"] for row in select_rows(rows, 0.1, held)]
        split = folder.split(name)
        assert split is not None
        expected = folder.tokenizer.encode_batch(texts)
        assert [ids.tolist() for ids in split] == expected
        assert [split[number].tolist() for number in range(len(split))] == expected
        assert split.tokens == sum(map(len, expected))
    assert split.counts == {
        "words": sum(len(t.split()) for t in texts),
        "bytes": sum(len(t.encode()) for t in texts),
    }


def test_workers_change_nothing_and_vocabularies_choose_the_width(sources: list[str], tmp_path: Path):
    expected = prepared(tmp_path / "P", sources, 1)
    for workers in (2, 5):
        assert prepared(tmp_path / str(workers), sources, workers) == expected
    manifest = Manifest.read(tmp_path / "P")
    assert manifest.dtype == np.uint16
    assert Manifest(**{**vars(manifest), "vocab_size": 2**16}).dtype == np.uint16
    assert Manifest(**{**vars(manifest), "vocab_size": 2**16 + 1}).dtype == np.uint32


def test_so_many_documents_are_held_out_and_long_ones_cut(tmp_path: Path):
    long = "word " * (PIECE // 2)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ("a", "b", long)))
    prepared(tmp_path / "P", [str(tmp_path / "a.jsonl")], validation=2)
    folder = PreparedFolder(tmp_path / "P")
    train, held = folder.split("train"), folder.split("validation")
    assert train is not None
    assert held is not None
    assert [folder.tokenizer.decode(ids.tolist()) for ids in held] == ["a", "b"]
    assert "".join(folder.tokenizer.decode(ids.tolist()) for ids in train) == long
    assert len(train) == 3
    assert [*pieces("x" * (PIECE + 1))] == ["x" * PIECE, "x"]


def killing(folder: Path, settings: Settings, sources: list[str], calls: int) -> None:
    """Prepare, and die by SIGKILL at the call of that number that makes something last."""
    left = [calls]

    def counted(function):
        def call(*values):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*values)

        return call

    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)
    preparing.prepare(sources, settings, folder, 2, print)


def test_killed_at_any_moment_it_goes_on(sources: list[str], tmp_path: Path):
    expected = prepared(tmp_path / "whole", sources)
    folder, settings = new_folder(tmp_path / "killed")
    chance, kills = random.Random(KILLS), 0
    while True:
        calls = chance.randint(1, 25) if kills < KILLS else 10**9
        process = processes.Process(target=killing, args=(folder, settings, sources, calls))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills
    assert content(folder) == expected


def test_preparation_resumes_with_equal_sources_and_settings_only(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, settings = new_folder(tmp_path / "P")
    commit, commits = preparing._Preparing._commit, iter(range(3))

    def stopping(*values):
        commit(*values)
        if next(commits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(preparing._Preparing, "_commit", stopping)
    with pytest.raises(KeyboardInterrupt):
        preparing.prepare(sources, settings, folder, 2, print)
    monkeypatch.setattr(preparing._Preparing, "_commit", commit)
    with pytest.raises(InputError, match="not finished; resume by the same polyformer data prepare"):
        PreparedFolder(folder)
    assert Manifest.read(folder).place is not None
    other = Settings(**{**vars(settings), "validation": 0.2})
    with pytest.raises(InputError, match=r"validation is 0.1 there, got 0.2; repeat the command"):
        preparing.prepare(sources, other, folder, 2, print)
    first = tmp_path / "a.jsonl"
    text = first.read_text()
    first.write_text(text.replace("document 0", "document x"))
    with pytest.raises(InputError, match=r"a.jsonl, which has changed since"):
        preparing.prepare(sources, settings, folder, 2, print)
    first.write_text(text)
    manifest = preparing.prepare(sources, settings, folder, 2, print)
    assert preparing.prepare(sources, settings, folder, 2, print) == manifest  # nothing is left to do
    assert content(folder) == prepared(tmp_path / "whole", sources)


def test_the_command(sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], complaint):
    out = tmp_path / "P"
    words = ["data", "prepare", *sources, "--column", "body", "--out", str(out), "--validation", "0.1"]
    train = ["--tokenizer", "train", "--algorithm", "bpe", "--vocab-size", "300"]
    assert main([*words, *train]) == 0
    assert "training tokens, " in capsys.readouterr().out
    assert main([*words, *train]) == 0  # finished already
    assert main(["data", "show", str(out), "--documents", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3 sources" in shown
    assert "0: 'document 0 says and little else'" in shown
    assert main(["data", "verify", str(out)]) == 0
    assert main([*words[:-4], "--out", str(tmp_path / "Q"), "--tokenizer", str(out)]) == 0
    assert PreparedFolder(tmp_path / "Q").tokenizer.fingerprint == PreparedFolder(out).tokenizer.fingerprint
    (tmp_path / "mix.yaml").write_text("P: 3\nQ: 1\n")
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "mix.yaml")]) == 0
    shown = capsys.readouterr().out
    assert f"mix.yaml: 75.0% of the rows are from {out}\n{out}: 3 sources" in shown
    assert f"mix.yaml: 25.0% of the rows are from {tmp_path / 'Q'}\n" in shown
    assert main(["data", "verify", str(tmp_path / "mix.yaml")]) == 0
    assert capsys.readouterr().out.count("tokens, checksums match") == 2
    assert "--vocab-size: requires --tokenizer train" in complaint(
        *words, "--tokenizer", out, "--vocab-size", 9
    )
    assert "vocab_size" in complaint(*words, "--tokenizer", "train", "--vocab-size", 9)
    assert "--out: not an option of `data show`" in complaint("data", "show", out, "--out", "x")
    assert "--out DIR is missing" in complaint("data", "prepare", "x", "--tokenizer", "train")
    assert "trained is 'bpe 300' there, got 'bpe 301'" in complaint(*words, *train[:-1], 301)
    assert "no such file" in complaint(
        "data", "prepare", tmp_path / "none.txt", *words[4:8], "--tokenizer", out
    )
    empty = tmp_path / "b.jsonl"
    assert "b.jsonl: empty" in complaint(
        "data", "prepare", empty, "--out", tmp_path / "R", "--tokenizer", out / "tokenizer"
    )


def test_damage_is_said(sources: list[str], tmp_path: Path, complaint):
    prepared(tmp_path / "P", sources)
    file = tmp_path / "P" / "train-00001.tokens"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    assert f"{file}: damaged: it has {len(whole) - 2:,} bytes where" in complaint(
        "data", "show", tmp_path / "P"
    )
    file.write_bytes(b"\xff\xff" + whole[2:])
    assert f"{file}: damaged: it does not hold" in complaint("data", "verify", tmp_path / "P")
    split = PreparedFolder(tmp_path / "P").split("train")
    ends = tmp_path / "P" / "train-00000.ends"
    before = ends.read_bytes()
    for content, said in (
        (b"\xff" * len(before), r"ends the last document at token 18446744073709551615 of"),
        (b"\xff" * 8 + before[8:], "ends a document before it begins"),
    ):
        ends.write_bytes(content)
        with pytest.raises(InputError, match=f"train-00000.ends: damaged: it {said}"):
            next(iter(PreparedFolder(tmp_path / "P").split("train")))
    ends.write_bytes(before)
    with pytest.raises(InputError, match=r"train-00001.tokens: damaged: it has the token 65535"):
        list(split)  # type: ignore[arg-type]
    file.unlink()
    assert f"{file}: damaged: it is missing" in complaint("data", "show", tmp_path / "P")
    file.write_bytes(whole)
    (tmp_path / "P" / MANIFEST).write_text('{"what": "polyformer prepared text", "version": 9}')
    assert "of version 9; prepare it again" in complaint("data", "show", tmp_path / "P")
    assert "no prepared text" in complaint("data", "show", tmp_path)
