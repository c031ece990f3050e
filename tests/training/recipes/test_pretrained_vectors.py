"""A token table that begins with word vectors: copied, frozen or not, resumed, and refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.recipes.fit import copy_vectors
from polyformer.training.recipes.recipe import VectorsConfig
from tiny_recipes import TEXT, tiny_recipe

WORDS = ["line", "says", "little", "unheard"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A text, and vectors of 16 numbers for some of its words."""
    text, vectors = tmp_path / "text.txt", tmp_path / "vectors.txt"
    text.write_text(TEXT)
    rows = np.random.default_rng(0).normal(size=(4, 16)).round(4)
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in zip(WORDS, rows.tolist())]
    vectors.write_text("\n".join(["4 16", *lines]) + "\n")
    return text, vectors


def recipe(files: tuple[Path, Path], frozen: bool, **changes: Any) -> Recipe:
    text, vectors = files
    tokenizer = {"algorithm": "wordpiece", "vocab_size": 80}
    own = {"vectors": {"path": str(vectors), "frozen": frozen}, "tokenizer": tokenizer}
    return tiny_recipe(text, **{"model": {"tied": False}, **own, **changes})


def table_of(files: tuple[Path, Path]) -> dict[str, list[float]]:
    lines = files[1].read_text().splitlines()[1:]
    return {word: list(map(float, numbers)) for word, *numbers in map(str.split, lines)}


@pytest.mark.parametrize("frozen", [True, False])
def test_vectors_are_copied_and_trained_or_not(
    frozen: bool, files: tuple[Path, Path], tmp_path: Path, capsys
):
    """Also when a run goes on from a checkpoint, for which the file need not be there any more."""
    fit(recipe(files, frozen, training={"steps": 2}), tmp_path / "run")
    said = capsys.readouterr().out
    assert f"vectors of {files[1]}: 3 of " in said
    assert (
        f"among its 4 words; the others begin at random, all are {'frozen' if frozen else 'trained'}" in said
    )
    expected = table_of(files)
    files[1].unlink()
    fitted = fit(recipe(files, frozen, training={"steps": 4}), tmp_path / "run", resume=True)
    tokenizer = Run.open(tmp_path / "run").tokenizer
    assert tokenizer is not None
    for word in WORDS[:3]:
        (number,) = tokenizer.encode(word)
        row = fitted.model.tokens.weight[number]
        assert torch.equal(row, torch.tensor(expected[word])) == frozen
        torch.testing.assert_close(row, torch.tensor(expected[word]), rtol=0, atol=0.1)
    assert fitted.model.tokens.weight.requires_grad != frozen


def model(**changes: Any) -> Transformer:
    return create_model("encoder-tiny", hidden_size=16, vocab_size=80, **changes)


def test_other_rows_and_both_tables_of_a_pair(files: tuple[Path, Path], tmp_path: Path):
    from polyformer.data import Tokenizer

    tokenizer = Tokenizer.of_words(["<pad>", "little", "far", "says"])
    pair = create_model("transformer-tiny", hidden_size=16, vocab_size=4, shared=False, tied=False, bos=0)
    before = [table.weight.clone() for table in (pair.tokens, pair.decoder_tokens)]
    copy_vectors(VectorsConfig(path=str(files[1])), pair, tokenizer)
    for table, old in zip((pair.tokens, pair.decoder_tokens), before):
        assert table.weight[1].tolist() == pytest.approx(table_of(files)["little"])
        assert table.weight[3].tolist() == pytest.approx(table_of(files)["says"])
        assert torch.equal(table.weight[[0, 2]], old[[0, 2]])


def test_a_width_of_its_own_needs_a_matrix(files: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(InputError) as caught:
        fit(recipe(files, True, model={"hidden_size": 32}), tmp_path / "run")
    assert str(caught.value) == (
        f"vectors: {files[1]} has vectors of 16 numbers, the token table of 32; use --model.embedding.size "
        "16, with a matrix from there to hidden_size (in language models beside --model.tied false), or "
        "--model.hidden_size 16"
    )
    assert not (tmp_path / "run" / "recipe.yaml").exists()
    narrow = {"hidden_size": 32, "embedding": {"size": 16}, "tied": False}
    fitted = fit(recipe(files, True, model=narrow), tmp_path / "run")
    assert fitted.model.tokens.weight.shape[1] == 16


def test_a_checkpoint_or_teacher_beside_vectors_is_refused(files: tuple[Path, Path]):
    with pytest.raises(InputError, match="vectors: a checkpoint and a teacher bring token vectors"):
        Recipe.from_dict({"model": {"pretrained": "DIR"}, "vectors": {"path": "FILE"}})


def test_the_command_line(files: tuple[Path, Path], tmp_path: Path, capsys):
    """One line and status 2 for a damaged file, a flag without its file, and nothing left behind."""
    text, vectors = files
    sizes = ["--model.hidden_size", "16", "--model.num_hidden_layers", "1", "--tokenizer.vocab_size", "100"]
    tokenizer = ["--tokenizer.algorithm", "wordpiece", *sizes, "--steps", "1", "--out", str(tmp_path / "run")]
    command = ["train", "--data", str(text), *tokenizer]
    assert main([*command, "--freeze-vectors"]) == 2
    assert capsys.readouterr().err.strip().endswith("requires --pretrained-vectors FILE")
    vectors.write_text(vectors.read_text()[:-20])
    assert main([*command, "--pretrained-vectors", str(vectors)]) == 2
    error = capsys.readouterr().err.strip()
    assert f"{vectors}: expected a word and 16 numbers in row 4" in error
    assert "\n" not in error
    assert not (tmp_path / "run").exists()
