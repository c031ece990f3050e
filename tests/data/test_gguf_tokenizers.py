"""Tokenizers in GGUF files give the ids of the tokenizers that they were written from."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

pytest.importorskip("gguf")

from gguf_files import write
from polyformer.core.errors import InputError
from polyformer.data import load_tokenizer

LEARNT = [
    "The quick brown fox isn't done: it'll jump 1987 times, at 12:45, over 3.14159 lazy dogs!",
    "def f(x):\n    return x + 100000\n\n\nEnd of  text.   Đây là một câu tiếng Việt; 数字 4096 個。",
    "<html> WE'VE SEEN the Straße & naïve café's œuvre -- 2048 x 2048 == 4194304 <|im_start|> not special",
] * 20
TEXTS = [
    *LEARNT[:3],
    "",
    " ",
    "  spaces  \n\n at both ends ",
    "e\u0301te\u0301 1234567 IT'S 🙂",
    "\tx\r\ny 10 ",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


WAYS: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([split(GPT2)], False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), split(GPT2)], False),  # its tokenizer.json's
    "llama-bpe": ([split(LLAMA3)], False),
    "qwen2": ([split(LLAMA3.replace("{1,3}", ""))], True),
}


def learnt(name: str) -> tokenizers.Tokenizer:
    """A byte-level BPE that splits texts as the published tokenizers of this kind do."""
    steps, nfc = WAYS[name]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LEARNT, trainer)
    return backend


def described(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """What a file says of it."""
    saved = json.loads(backend.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": [" ".join(pair) for pair in saved["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


@pytest.mark.parametrize("pre", WAYS)
def test_byte_level_bpe(pre: str, tmp_path: Path):
    backend = learnt(pre)
    path = write(tmp_path / "a.gguf", "llama", {}, {}, described(backend, pre))
    ours = load_tokenizer(path)
    backend.encode_special_tokens = True
    for text in TEXTS:
        assert ours.encode(text) == backend.encode(text).ids, text
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        assert ours.decode(ours.encode(text)) == normal
    begin = [1] if pre == "llama-bpe" else []  # which llama.cpp puts there where the file says nothing
    assert ours.encode_for_model("<|im_end|>")[0] == [*begin, 2]
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.special_ids) == (1, 2, None, {0, 1, 2})
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_marks_and_words_of_its_own(tmp_path: Path):
    backend = learnt("gpt-2")
    values = described(backend, "gpt-2", add_bos_token=True, add_eos_token=True, padding_token_id=0)
    kept = {"tokens": [*values["tokens"], "lazy dogs"], "token_type": [*values["token_type"], 4]}
    ours = load_tokenizer(write(tmp_path / "a.gguf", "llama", {}, {}, values | kept))
    added = len(values["tokens"])
    ids, types = ours.encode_for_model("a", "lazy dogs")
    assert ids == [1, *ours.encode("a"), 2, 1, added, 2]
    assert types == [0, 0, 0, 1, 1, 1]
    assert added not in ours.special_ids
    assert ours.decode([added]) == "lazy dogs"
    assert ours.pad_id == 0


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNT),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        hard_vocab_limit=False,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(theirs.vocab_size())
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in numbers
    ]
    values = {
        "model": "llama",
        "tokens": [theirs.id_to_piece(i) for i in numbers],
        "scores": [theirs.get_score(i) for i in numbers],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    ours = load_tokenizer(write(tmp_path / "a.gguf", "llama", {}, {}, values))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_for_model("fox")[0] == [1, *theirs.encode("fox")]
    assert (ours.unk_id, ours.bos_id, ours.eos_id) == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', and only gpt2 and llama are supported"),
        ({"model": None}, "tokenizer.ggml.model is None, and only gpt2"),
        ({"pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat', and only default, gpt-2"),
        ({"tokens": None}, "damaged: 0 tokens"),
        ({"token_type": [1]}, "damaged: 420 tokens, 420 of them different, 1 kinds"),
        ({"merges": [1, 2]}, "damaged: expected a list of str as tokenizer.ggml.merges"),
        ({"merges": ["nothing"]}, "not a tokenizer file, or a damaged one"),
        ({"eos_token_id": 420}, "tokenizer.ggml.eos_token_id is 420, expected 0 to 419"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes', expected bool"),
        ({"model": "llama"}, "damaged: 0 scores of 420 pieces"),
    ],
)
def test_unknown_and_damaged_vocabularies_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    values = {**described(learnt("gpt-2"), "gpt-2"), **changes}
    path = tmp_path / "a.gguf"
    write(path, "llama", {}, {}, {name: value for name, value in values.items() if value is not None})
    with pytest.raises(InputError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: {message}")
