"""Models trained with other options than the usual ones have SentencePiece's own ids."""

import io
import random
from pathlib import Path
from typing import Any

import pytest

from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

LEARNT = [
    f"The cat, {i} years old, sat on the mat of New York. Crème brûlée {i} for the <sep> dog and other dogs"
    for i in range(30)
]
PARTS = [
    "the",
    "cat",
    " ",
    "  ",
    "<sep>",
    "<unk>",
    "<s>",
    "</s>",
    "<0x41>",
    "ab",
    "x",
    "dog",
    "é",
    "New York",
]
PARTS += ["ß", "\u3000", "\n", "1", "ｱ", "he"]
SYMBOLS = ["<sep>", "ab", "the", "he"]
OPTIONS = {
    "plain": {},
    "across words": {"split_by_whitespace": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "symbols": {"user_defined_symbols": SYMBOLS},
    "spaces": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["▁▁", "\n"],
    },
    "identity": {"normalization_rule_name": "identity"},
    "no prefix": {"add_dummy_prefix": False, "split_by_whitespace": False, "user_defined_symbols": SYMBOLS},
    "bytes": {"byte_fallback": True, "vocab_size": 340},
    "bytes and suffix": {
        **{"byte_fallback": True, "vocab_size": 340, "treat_whitespace_as_suffix": True},
        "user_defined_symbols": SYMBOLS,
    },
}


def learn(path: Path, **options: object) -> Path:
    model = io.BytesIO()
    defaults = {"vocab_size": 70, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNT), model_writer=model, **{**defaults, **options}
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_ids_of_random_text(tmp_path, model_type, options):
    path = learn(tmp_path / "spm.model", model_type=model_type, **OPTIONS[options])
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path)
    draw = random.Random(0)
    texts = [*LEARNT[:2], *("".join(draw.choices(PARTS, k=draw.randrange(12))) for _ in range(200))]
    expected = theirs.encode(texts)
    assert tokenizer.encode_batch(texts) == expected
    for ids in expected:
        if theirs.unk_id() not in ids:
            assert tokenizer.decode(ids) == theirs.decode(ids)
    again = load_tokenizer(tokenizer.save(tmp_path / "saved").parent)
    assert again.encode_batch(texts) == expected


@pytest.mark.parametrize("symbol", ["\n", "ﬁ"])
def test_a_symbol_that_the_normalization_changes_is_refused(tmp_path, symbol):
    path = learn(tmp_path / "spm.model", user_defined_symbols=[symbol])
    with pytest.raises(InputError, match=r"the user-defined symbol .* is changed by its own normalization"):
        load_tokenizer(path)


def test_pieces_with_spaces_are_refused(tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2

    path = learn(tmp_path / "spm.model")
    for change in ("escape", "unused"):
        model = schema.ModelProto.FromString(path.read_bytes())
        if change == "escape":
            model.normalizer_spec.escape_whitespaces = False
        else:
            model.pieces[-1].type = model.pieces[-1].UNUSED
        changed = tmp_path / f"{change}.model"
        changed.write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match=f"{change}.model: a SentencePiece model with unused pieces"):
            load_tokenizer(changed)


def test_pieces_without_merges_are_refused_with_symbols(tmp_path):
    """A piece of BPE that merges do not form would be found only where symbols are next to it."""
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2

    path = learn(tmp_path / "spm.model", model_type="bpe", user_defined_symbols=SYMBOLS)
    model = schema.ModelProto.FromString(path.read_bytes())
    model.pieces[-1].piece = "xyz"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="pieces that no merges form, such as 'xyz'"):
        load_tokenizer(path)
