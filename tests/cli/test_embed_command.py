"""`polyformer embed`: vectors of one text at a time, of several processes, after a kill; what it refuses."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import bert_files, byte_files, piece_files, save
from pyarrow import parquet

import polyformer
from launching import torchrun
from polyformer.applications.embedding import OutputFormat, Parts, Texts, embed
from polyformer.applications.encoder import Encoder
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import pool
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.checkpoints.folder_files import write_modules
from polyformer.models.presets import create_model
from polyformer.nn.heads import EmbedConfig
from tolerances import assert_rounded

TEXTS = [f"Anna {'and Tom ' * (i % 7)}flew from Oslo {'twice' * (i % 3)}" for i in range(43)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers: a tiny BERT, its tokenizer and modules."""
    folder = tmp_path_factory.mktemp("sentence")
    save(
        folder,
        "bert-base",
        bert_files(folder),
        head=EmbedConfig(pooling="first", hidden=True, normalize=False),
    )
    write_modules(create_model("encoder-tiny", head=EmbedConfig(pooling="max")).config, folder)
    return folder


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """TEXTS, one in each line."""
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS) + "\n")
    return file


def vectors_of(file: Path) -> np.ndarray:
    """The column of vectors, [rows, E]."""
    return np.array(parquet.read_table(file)["vector"].to_pylist())


def singly(model: polyformer.Transformer, folder: Path, read: Callable[..., torch.Tensor]) -> np.ndarray:
    """The vector of each text, computed alone."""
    tokenizer = load_tokenizer(folder)
    rows = [torch.tensor([tokenizer.encode_for_model(text)[0]]) for text in TEXTS]
    with torch.no_grad():
        return torch.cat([read(model(row)) for row in rows]).numpy()


def test_a_folder_of_sentence_transformers(sentence: Path, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.parquet"
    assert main(["embed", str(sentence), str(lines), "--out", str(out), "--rows", "10", "--with-text"]) == 0
    table = parquet.read_table(out)
    assert (table["id"].to_pylist(), table["text"].to_pylist()) == ([*range(43)], TEXTS)
    assert parquet.ParquetFile(out).num_row_groups == 5
    assert [path.name for path in tmp_path.glob("*vectors*")] == ["vectors.parquet"], "parts are cleared away"
    expected = singly(polyformer.from_pretrained(sentence, "embed"), sentence, lambda output: output.logits)
    assert np.abs(vectors_of(out) - expected).max() < 1e-5


def test_a_model_of_ours_in_half_precision(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), TEXTS)
    tokenizer.save(folder)
    model = create_model(
        "encoder-tiny", vocab_size=len(tokenizer), head="embed", max_position_embeddings=128
    ).eval()
    model.save_pretrained(folder)
    embed(Encoder(folder, CPU), Texts(files=(str(lines),)), tmp_path / "parts", OutputFormat(dtype="float16"))
    assert parquet.read_schema(tmp_path / "parts" / "part-000000.parquet").field("vector").type == pa.list_(
        pa.float16(), model.config.hidden_size
    )
    ids = [[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in TEXTS]
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([row])).logits for row in ids]).numpy()
    assert np.abs(vectors_of(tmp_path / "parts") - expected).max() < 1e-3


@pytest.mark.parametrize(("preset", "pooling"), [("roberta-base", "mean"), ("gpt2", "last")])
def test_a_pooling_by_name(lines: Path, tmp_path: Path, preset: str, pooling: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, preset, byte_files(folder, preset.partition("-")[0]))
    with pytest.raises(
        InputError, match="neither model nor folder defines a pooling; choose it with --pooling"
    ):
        Encoder(folder, CPU)
    out = tmp_path / "vectors.parquet"
    encoder = Encoder(folder, CPU, pooling, normalize=False)
    embed(encoder, Texts(files=(str(lines),)), out)
    model = polyformer.from_pretrained(folder)
    expected = singly(model, folder, lambda output: pool(output.last_hidden_state, None, pooling))
    assert np.abs(vectors_of(out) - expected).max() < 1e-5


def test_the_encoder_of_an_encoder_decoder(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = piece_files(folder)
    save(folder, "t5-small", tokenizer)
    embed(Encoder(folder, CPU, "mean"), Texts(files=(str(lines),)), tmp_path / "vectors.parquet")
    model = polyformer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode_for_model(TEXTS[5])[0]])

    def expected() -> torch.Tensor:
        hidden = model.encode(ids).source
        assert hidden is not None
        return torch.nn.functional.normalize(hidden.mean(1), dim=-1)[0].detach()

    single = expected()
    model.double()
    vector = torch.tensor(vectors_of(tmp_path / "vectors.parquet")[5], dtype=torch.float32)
    assert_rounded(vector, single, expected())


def test_columns_of_tables(sentence: Path, tmp_path: Path) -> None:
    rows = [{"key": f"k{i}", "body": text, "note": "x"} for i, text in enumerate(TEXTS)]
    parquet.write_table(pa.Table.from_pylist(rows[:20]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    files = (str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl"))
    both = [*Texts(files=files, column="note", id="key").rows()]
    assert both == [(f"k{i}", "x") for i in range(43)]
    assert [text for _, text in Texts(files=files).rows()] == TEXTS, "`body` is a usual name"
    for texts, message in (
        (
            Texts(files=files, column="txt"),
            "no column 'txt', which --column names; it has 'key', 'body', 'note'",
        ),
        (Texts(files=files, id="txt"), "no column 'txt', which --id names"),
    ):
        with pytest.raises(InputError, match=message):
            list(texts.rows())
    (tmp_path / "c.jsonl").write_text('{"a": "x", "b": "y"}\n{"a": 1, "b": "z"}\n')
    with pytest.raises(InputError, match=r"which of 'a', 'b' is the text[?] Say it by --column NAME"):
        list(Texts(files=(str(tmp_path / "c.jsonl"),)).rows())
    with pytest.raises(InputError, match=r"c.jsonl, row 2: --id a: 1 is of another type"):
        list(Texts(files=(str(tmp_path / "c.jsonl"),), column="b", id="a").rows())


def test_texts_that_are_too_long(sentence: Path, lines: Path, tmp_path: Path) -> None:
    texts = Texts(files=(str(lines),))
    encoder = Encoder(sentence, CPU, max_length=6)
    assert embed(encoder, texts, tmp_path / "cut.parquet").cut == 40  # three have two words
    begin = load_tokenizer(sentence).encode_for_model(TEXTS[3])[0]
    model = polyformer.from_pretrained(sentence, "embed")
    with torch.no_grad():
        expected = model(torch.tensor([[*begin[:5], begin[-1]]])).logits[0].numpy()
    assert np.abs(vectors_of(tmp_path / "cut.parquet")[3] - expected).max() < 1e-5
    with pytest.raises(InputError, match="the text 1 has more than the maximum of 6 tokens"):
        embed(encoder, texts, tmp_path / "refused.parquet", OutputFormat(too_long="refuse"))
    with pytest.raises(InputError, match=r"max_length: expected at most 512, the limit of .*, got 513"):
        Encoder(sentence, CPU, max_length=513)


def test_other_vectors_are_not_mixed_in(sentence: Path, lines: Path, tmp_path: Path) -> None:
    texts, out = Texts(files=(str(lines),)), tmp_path / "vectors"
    embed(Encoder(sentence, CPU), texts, out, OutputFormat(rows=20), rank=0, world=2)
    with pytest.raises(InputError, match="started with another rows; choose another --out"):
        embed(Encoder(sentence, CPU), texts, out, OutputFormat(rows=10))
    with pytest.raises(InputError, match="started with other model, head"):
        embed(Encoder(sentence, CPU, "mean"), texts, out, OutputFormat(rows=20))
    (tmp_path / "mine.parquet").write_text("mine")
    with pytest.raises(InputError, match=r"mine.parquet: contains something else"):
        embed(Encoder(sentence, CPU), texts, tmp_path / "mine.parquet")
    with pytest.raises(InputError, match=f"{tmp_path}: contains something else"):
        embed(Encoder(sentence, CPU), texts, tmp_path)
    lines.write_text("")
    with pytest.raises(InputError, match="empty"):
        embed(Encoder(sentence, CPU), texts, tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("MODEL", "--out is missing"),
        ("MODEL a.txt", "--out is missing"),
        ("nowhere a.txt --out v", "nowhere: no such directory"),
        ("MODEL a.txt --out v --unnormalized", "--unnormalized: requires --pooling"),
        ("MODEL nowhere.txt --out v", "nowhere.txt: no such file"),
        ("MODEL a.txt --out v --file a.txt", "--file: not available with FILE"),
        ("MODEL a.txt --out v --lines", "--lines: not available with FILE"),
        ("MODEL --file a.txt --out v --column body", "--column: requires FILE"),
        ("MODEL --file none.txt --out v", "--file: none.txt"),
        ("MODEL a.txt --out v --rows 0", "rows: expected 1 or more, got 0"),
    ],
)
def test_embed_refuses_missing_files_and_options(
    sentence: Path, words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    assert main(["embed", *words.replace("MODEL", str(sentence)).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_is_one_text_or_a_text_per_line(
    sentence: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = TEXTS[:3]
    content = "\n".join(texts) + "\n"
    (tmp_path / "texts.txt").write_text(content)
    monkeypatch.chdir(tmp_path)

    def embedded(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(content))
        out = f"{len(list(tmp_path.iterdir()))}.parquet"
        assert main(["embed", *words, "--out", out, "--with-text", str(sentence)]) == 0
        table = parquet.read_table(out)
        assert table["id"].to_pylist() == [*range(len(table))]
        expected = Encoder(sentence, CPU).vectors(table["text"].to_pylist())[0]
        assert np.abs(vectors_of(Path(out)) - expected.numpy()).max() < 1e-5
        return table["text"].to_pylist()

    for file in ("texts.txt", "-"):
        assert embedded("--file", file) == [content.rstrip()]
        assert embedded("--file", file, "--lines") == texts
    assert embedded("--lines") == embedded() == texts
    capsys.readouterr()
    assert main(["embed", str(sentence), "good film?", "--out", "v"]) == 2
    assert "FILE: expected the name of a file, got a text, 'good film?'" in capsys.readouterr().err


def test_other_texts_of_standard_input_are_not_mixed_in(
    sentence: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["embed", str(sentence), "--lines", "--out", str(tmp_path / "vectors")]
    for text, status in (("a\n", 0), ("a\n", 0), ("b\n", 2)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(words) == status
    assert "started with another texts" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main([*words[:-1], str(tmp_path / "none")]) == 2
    assert "standard input: empty; there is no text to embed" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*words[:-1], str(tmp_path / "none")]) == 2
    assert "several processes cannot share standard input" in capsys.readouterr().err


def test_processes_that_never_meet_write_what_one_does(sentence: Path, lines: Path, tmp_path: Path) -> None:
    encoder, texts, form = Encoder(sentence, CPU), Texts(files=(str(lines),)), OutputFormat(rows=5)
    first, second = tmp_path / "one.parquet", tmp_path / "two.parquet"
    embed(encoder, texts, first, form)
    assert not embed(encoder, texts, second, form, rank=1, world=2).complete
    assert not second.exists()
    assert embed(encoder, texts, second, form, rank=0, world=2).complete
    assert second.read_bytes() == first.read_bytes()
    assert embed(encoder, texts, second, form).computed == 0


@pytest.mark.parametrize("name", ["vectors.parquet", "vectors"])
def test_a_second_run_does_not_repeat_the_work(
    sentence: Path, lines: Path, tmp_path: Path, name: str
) -> None:
    """It begins while the first computes its second part, is refused, and leaves nothing."""
    texts, form, out = Texts(files=(str(lines),)), OutputFormat(rows=10), tmp_path / name

    class Interrupted(Encoder):
        def vectors(self, texts_of_a_part: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
            if Parts(out, {}).path(0).is_file():
                with pytest.raises(InputError, match=rf"in use by process {os.getpid()} on .* continues it"):
                    embed(second, texts, out, form)
            return super().vectors(texts_of_a_part)

    second = Encoder(sentence, CPU)
    progress = embed(Interrupted(sentence, CPU), texts, out, form)
    assert progress.complete
    assert progress.computed == 43
    embed(second, texts, tmp_path / f"other-{name}", form)
    assert embed(second, texts, out, form).computed == 0
    assert not list(tmp_path.rglob(".*")), "no lock is left"


def test_a_killed_process_is_gone_on_with(sentence: Path, lines: Path, tmp_path: Path) -> None:
    """Both end when the second dies with half a part on the disk; one process does the rest."""
    out, whole = tmp_path / "two.parquet", tmp_path / "one.parquet"
    ended = torchrun(__file__, "embed", sentence, lines, "--out", out, "--rows", 5)
    assert "process 1 ended with status -9" in ended.stderr, ended.stderr[-3000:]
    assert not out.exists()
    encoder, texts, form = Encoder(sentence, CPU), Texts(files=(str(lines),)), OutputFormat(rows=5)
    assert 0 < embed(encoder, texts, out, form).computed < 43
    embed(encoder, texts, whole, form)
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "two.parquet.parts").exists()


def kill_the_second_process() -> None:
    """The second process dies by SIGKILL with half of its second part on the disk."""
    write, numbers = Parts.write, list[int]()

    def dying(self: Parts, number: int, columns: dict[str, pa.Array]) -> None:
        if numbers:
            (self.folder / ".part-000003.parquet.ab.partial").write_bytes(b"PAR1")
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, number, columns)
        numbers.append(number)

    if os.environ["RANK"] == "1":
        Parts.write = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_the_second_process()
    sys.exit(main(sys.argv[1:]))
