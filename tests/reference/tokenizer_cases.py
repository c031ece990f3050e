"""Texts in several scripts, and the comparison of our tokenizers with those of transformers."""

import json
from pathlib import Path

import pytest

from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

LEARNT = [
    "The quick brown fox jumps over the lazy dog, and the dog barks at the fox.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche; ein Café.",
    "Tiếng Việt là ngôn ngữ của người Việt và là ngôn ngữ chính thức tại Việt Nam.",
    "我们 是 学生, 今天 天气 很 好. 日本語 の テキスト です.",
    "Le garçon a été très déçu par l'été à Paris, où il n'a rien vu.",
    "To be, or not to be: that is the question the fox asks the lazy dog.",
] * 4
TEXTS = [
    "The lazy fox barks.",
    "  spaces at  both ends   ",
    "Où est le garçon? À Paris, déçu!",
    "Tiếng Việt là ngôn ngữ",
    "Tie\u0302\u0301ng Vie\u0323\u0302t",
    "我们是学生, 今天天气很好 日本語のテキスト",
    "\uff26\uff35\uff2c\uff2c\u3000\uff57\uff49\uff44\uff54\uff48 \ufb01ne \u2116",
    "an emoji 🦊🦊 and 👩‍👩‍👧 here",
    "tabs\tand\nbreaks\r\nof lines\u00a0and\u2003wide",
    "'' quotes `` and  Büsche",
    "a <mask> b</s> <s>c <pad><unk> <extra_id_0>, [MASK] [CLS]x[SEP] <|endoftext|> __fr__ d",
    "",
    " ",
]
PAIRS = [("the fox", "the dog"), ("Le garçon", "a été"), (" a <mask> b", "[MASK] c </s>")]


def write(folder: Path, **files: object) -> Path:
    """JSON files by their names without .json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def same(ours: Tokenizer, theirs, texts=TEXTS, pairs=PAIRS, types: bool = True) -> None:
    """The same ids and types for texts and pairs, alone and in a batch, and the same special tokens."""
    rows = [(text,) for text in texts] + list(pairs)
    for row in rows:
        expected = theirs(*row, return_token_type_ids=True)
        ids, kinds = ours.encode_for_model(*row)
        assert ids == expected["input_ids"], f"{row}: {theirs.convert_ids_to_tokens(ids)}"
        assert not types or kinds == expected["token_type_ids"]
    assert ours.encode_batch_for_model(texts) == [ours.encode_for_model(text) for text in texts]
    for role in ("pad", "unk", "bos", "eos", "cls", "sep", "mask"):
        theirs_id = getattr(theirs, f"{role}_token_id")
        assert theirs_id is None or getattr(ours, f"{role}_id") == theirs_id, role
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert len(ours) == len(theirs)


def both(folder: Path, name: str) -> tuple[Tokenizer, transformers.PreTrainedTokenizerBase]:
    return load_tokenizer(folder), getattr(transformers, name).from_pretrained(folder)


def saves(ours: Tokenizer, folder: Path, model_type: str) -> None:
    """What is saved, transformers and we load with the same ids, beside the model's config or alone."""
    for file in ({}, {"config": {"model_type": model_type}}):
        write(ours.save(folder / "saved").parent, **file)
        same(ours, transformers.AutoTokenizer.from_pretrained(folder / "saved"), types=False)
    again = load_tokenizer(folder / "saved")
    rows = [(text,) for text in TEXTS] + PAIRS
    assert [again.encode_for_model(*row) for row in rows] == [ours.encode_for_model(*row) for row in rows]
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    assert (again.roles, again.special_ids) == (ours.roles, ours.special_ids)
