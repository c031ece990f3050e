"""Tokenizers of BPE and WordPiece files give transformers' own ids: each family's files, saved and loaded.

The files are published ones, cut to their first pieces, or learned here.
"""

import json
from pathlib import Path

import pytest
from tokenizer_cases import LEARNT, TEXTS, both, same, saves, write

from polyformer.data.tokenizers.tokenizer import Tokenizer

pytest.importorskip("transformers")

MERGES = 3000


def bytelevel(shared_data, folder: Path, special: list[str], **files: object) -> Path:
    """The first merges of GPT-2's published files and their pieces, then special tokens."""
    data = shared_data("tokenizers")
    pieces = json.loads((data / "gpt2-encoder.json").read_text())
    names = [name for name, number in pieces.items() if number < 256 + MERGES]
    vocab = {name: number for number, name in enumerate([*names, "<|endoftext|>", *special])}
    lines = (data / "gpt2-vocab.bpe").read_text().split("\n")[: MERGES + 1]
    (folder / "merges.txt").write_text("\n".join([*lines, ""]))
    return write(folder, vocab=vocab, **files)


@pytest.mark.parametrize(
    ("name", "model_type", "special", "config"),
    [
        ("GPT2Tokenizer", "gpt2", [], {}),
        ("GPT2Tokenizer", "gptj", [], {"pad_token": "<|pad|>", "additional_special_tokens": ["<|x|>"]}),
        ("RobertaTokenizer", "roberta", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], {}),
        ("BartTokenizer", "bart", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], {"add_prefix_space": True}),
        (
            "RobertaTokenizer",
            "longformer",
            ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            {"mask_token": {"content": "<mask>", "lstrip": True}},
        ),
        ("DebertaTokenizer", "deberta", ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"], {}),
    ],
)
def test_bytelevel_families(shared_data, tmp_path, name, model_type, special, config):
    options = {key: value for key, value in config.items() if not isinstance(value, dict)}
    roles = {key: value for key, value in config.items() if isinstance(value, dict)}
    files = {"tokenizer_config": options, "special_tokens_map": roles, "config": {"model_type": model_type}}
    ours, theirs = both(bytelevel(shared_data, tmp_path, special, **files), name)
    same(ours, theirs)
    saves(ours, tmp_path, model_type)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BertTokenizer", {}),
        ("ElectraTokenizer", {"do_lower_case": False}),
        ("DistilBertTokenizer", {"strip_accents": False, "tokenize_chinese_chars": False}),
    ],
)
def test_wordpiece_families(shared_data, tmp_path, name, config):
    vocab = (shared_data("tokenizers") / "bert-base-uncased-vocab.txt").read_bytes()
    (tmp_path / "vocab.txt").write_bytes(vocab)
    write(tmp_path, tokenizer_config={"tokenizer_class": f"{name}Fast", **config})
    ours, theirs = both(tmp_path, name)
    same(ours, theirs)
    saves(ours, tmp_path, "bert")


def old_bpe(folder: Path, lowered: bool) -> list[str]:
    """The merges of words that end by </w>, in merges.txt, and all the pieces there are."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=260, end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator([text.lower() if lowered else text for text in LEARNT], trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]))
    return sorted(backend.get_vocab())


def test_gpt(tmp_path):
    vocab = {name: number for number, name in enumerate(["<unk>", *old_bpe(tmp_path, True)])}
    ours, theirs = both(
        write(tmp_path, vocab=vocab, config={"model_type": "openai-gpt"}), "OpenAIGPTTokenizer"
    )
    same(ours, theirs, types=False)
    saves(ours, tmp_path, "openai-gpt")
    assert ours.decode(ours.encode("The lazy fox")) == "the lazy fox"


def test_ctrl(tmp_path):
    """@@ where a word goes on; pieces that the vocabulary lacks are merged through, and unknown at last."""
    pieces = [
        name.removesuffix("</w>") if "</w>" in name else f"{name}@@" for name in old_bpe(tmp_path, False)
    ]
    names = ["<unk>", *(name for i, name in enumerate(pieces) if i % 7 != 3)]
    vocab = {name: number for number, name in enumerate(names)}
    ours, theirs = both(write(tmp_path, vocab=vocab, config={"model_type": "ctrl"}), "CTRLTokenizer")
    words_saved(ours, theirs, tmp_path)
    assert ours.decode(ours.encode("The lazy fox")) == theirs.decode(theirs("The lazy fox")["input_ids"])


@pytest.mark.parametrize("lowered", [True, False])
def test_xlm(tmp_path, lowered):
    pytest.importorskip("sacremoses")
    pieces = [name for i, name in enumerate(old_bpe(tmp_path, lowered)) if i % 9 != 3]
    merges = (tmp_path / "merges.txt").read_text().split("\n")[1:]
    (tmp_path / "merges.txt").write_text("\n".join(f"{line} 17" if line else line for line in merges))
    names = ["<s>", "</s>", "<pad>", "<unk>", *(f"<special{i}>" for i in range(10)), *pieces]
    config = {"do_lowercase_and_remove_accent": lowered, "tokenizer_class": "XLMTokenizer"}
    vocab = {name: number for number, name in enumerate(names)}
    ours, theirs = both(write(tmp_path, vocab=vocab, tokenizer_config=config), "XLMTokenizer")
    more = [
        "\u201cQuotes\u201d \u2026 and \u300amore\u300b\uff1a \uff11\uff12\uff05 \u3010x\u3011\u3002 end",
        "don't stop-it, U.S. e.g. 3.5",
        "a<special3>b </s>",
    ]
    words_saved(ours, theirs, tmp_path, more)
    assert ours.decode(ours.encode("the lazy fox")) == "the lazy fox"


def words_saved(ours: Tokenizer, theirs, folder: Path, more: tuple[str, ...] = ()) -> None:
    same(ours, theirs, [*TEXTS, *more])
    ours.save(folder / "saved")
    again, theirs = both(folder / "saved", type(theirs).__name__)
    same(again, theirs, [*TEXTS, *more])
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
