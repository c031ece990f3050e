"""Tokenizers of checkpoints give transformers' own ids: each family from its own files, saved and loaded.

SentencePiece models are learnt here, small, from texts in several scripts; BPE and WordPiece files are
written out. Where transformers 5 departs from what checkpoints were trained on, SentencePiece itself is the
reference.
"""

import io
import json
from pathlib import Path

import pytest

from polyformer.core.errors import InputError
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.tokenizer_loading import load_tokenizer

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

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


def learn(path: Path, model_type: str = "unigram", texts: list[str] = LEARNT, **options) -> Path:
    """A SentencePiece model at `path`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=model_type,
        minloglevel=2,
        **{"vocab_size": 230, "character_coverage": 1.0, "hard_vocab_limit": False, **options},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


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


T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
}
BIG_BIRD = {
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "user_defined_symbols": ["[CLS]", "[SEP]", "[MASK]"],
}
DEBERTA = {
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "pad_piece": "[PAD]",
    "bos_piece": "[CLS]",
    "eos_piece": "[SEP]",
    "unk_piece": "[UNK]",
}
IN_BYTES = {"byte_fallback": True, "vocab_size": 500, "character_coverage": 0.99}
MERGES = 3000
SPECIAL = TEXTS[10]
ENDS_IN_SPACE = ("  spaces at  both ends   ", SPECIAL, " ")


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


@pytest.mark.parametrize("config", [{}, {"extra_ids": 7}])
def test_t5(tmp_path, config):
    learn(tmp_path / "spiece.model", **T5)
    ours, theirs = both(write(tmp_path, config={"model_type": "t5"}, tokenizer_config=config), "T5Tokenizer")
    same(ours, theirs)
    saves(ours, tmp_path, "t5")
    last = len(ours) - 1
    assert ours.encode_for_model("<extra_id_0>")[0] == [last, ours.eos_id]
    assert last not in ours.encode("<extra_id_0>"), "text is text"


def test_xlm_roberta(tmp_path):
    """fairseq's ids: the model's third piece has the id 4."""
    learn(tmp_path / "sentencepiece.bpe.model")
    ours, theirs = both(write(tmp_path, config={"model_type": "xlm-roberta"}), "XLMRobertaTokenizer")
    same(ours, theirs)
    saves(ours, tmp_path, "xlm-roberta")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.bpe.model"))
    assert ours.encode("the fox") == [number + 1 for number in pieces.encode("the fox")]
    assert not ours.special_ids & set(ours.encode("</s><mask> <s><pad>")) - {ours.unk_id}


@pytest.mark.parametrize("config", [{}, {"do_lower_case": False, "keep_accents": True}])
def test_albert(tmp_path, config):
    learn(tmp_path / "spiece.model", **ALBERT)
    write(tmp_path, tokenizer_config={"tokenizer_class": "AlbertTokenizer", **config})
    ours, theirs = both(tmp_path, "AlbertTokenizer")
    same(ours, theirs)
    saves(ours, tmp_path, "albert")


def test_a_comma_never_joins_a_number_in_albert(tmp_path):
    """As ALBERT's own code and transformers 4 have it; transformers 5 reads the scores as they are."""
    from sentencepiece import sentencepiece_model_pb2

    path = learn(tmp_path / "spiece.model", **ALBERT)
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for piece, score in (("0", -5.0), ("9", -5.0), ("9,", -0.1)):
        model.pieces.add(piece=piece, score=score)
    path.write_bytes(model.SerializeToString())
    ours, theirs = both(write(tmp_path, config={"model_type": "albert"}), "AlbertTokenizer")
    assert theirs.tokenize("9, 0") == ["\u2581", "9,", "\u2581", "0"]
    assert [ours.token(number) for number in ours.encode("9, 0")] == ["\u2581", "9", ",", "\u2581", "0"]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_m2m_100(tmp_path, model_type):
    """The ids are those of vocab.json; the language of the text comes first."""
    path = learn(tmp_path / "sentencepiece.bpe.model", model_type)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    names = sorted(pieces.id_to_piece(number) for number in range(3, len(pieces)))
    vocab = {name: number for number, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *names])}
    languages = [
        f"__{code}__"
        for code in transformers.M2M100Tokenizer.__init__.__globals__["FAIRSEQ_LANGUAGE_CODES"]["m2m100"]
    ]
    write(
        tmp_path,
        vocab=vocab,
        config={"model_type": "m2m_100"},
        tokenizer_config={"src_lang": "vi"},
        special_tokens_map={"eos_token": "</s>", "additional_special_tokens": languages},
    )
    ours, theirs = both(tmp_path, "M2M100Tokenizer")
    same(ours, theirs, types=False)
    saves(ours, tmp_path, "m2m_100")
    assert ours.encode_for_model("x")[0][0] == ours.languages["vi"]
    theirs.src_lang = "fr"
    assert ours.encode_for_model("Le garçon", language="fr")[0] == theirs("Le garçon")["input_ids"]
    assert list(ours.languages.values()) == [theirs.get_lang_id(code) for code in ours.languages]


@pytest.mark.parametrize("table", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize(
    ("name", "file", "model_type", "options"),
    [
        ("BigBirdTokenizer", "spiece.model", "unigram", BIG_BIRD),
        ("DebertaV2Tokenizer", "spm.model", "unigram", DEBERTA),
        ("ReformerTokenizer", "spiece.model", "bpe", {}),
    ],
)
def test_families_that_go_by_sentencepiece(tmp_path, name, file, model_type, options, table):
    """SentencePiece's own ids everywhere; transformers' where it leaves spaces and characters alone too.

    transformers 5 keeps a space at the end as a piece of its own, and reads BigBird's and DeBERTa's texts
    without the model's table of characters, which both were trained with.
    """
    path = learn(tmp_path / file, model_type, normalization_rule_name=table, **options)
    ours, theirs = both(write(tmp_path, tokenizer_config={"tokenizer_class": name}), name)
    texts = [text for text in TEXTS if text not in ENDS_IN_SPACE]
    if table == "identity":
        reformer = name == "ReformerTokenizer"  # which drops double spaces with the table alone
        texts = [text for text in texts if not reformer or "  " not in text]
        same(ours, theirs, texts, PAIRS[:2], types=not reformer)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    plain = [text for text in TEXTS if text != SPECIAL and (table != "identity" or "\t" not in text)]
    plain = [text for text in plain if table != "identity" or "\u0302" not in text]
    assert ours.encode_batch(plain) == own.encode(plain)
    saves(ours, tmp_path, "reformer")


def test_deberta_v2_adds_its_mask_and_splits_at_punctuation(tmp_path):
    learn(tmp_path / "spm.model", normalization_rule_name="identity", **DEBERTA)
    config = {"do_lower_case": True, "split_by_punct": True}
    write(
        tmp_path, tokenizer_config=config, added_tokens={"[MASK]": 111}, config={"model_type": "deberta-v2"}
    )
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    write(tmp_path, added_tokens={"[MASK]": len(own)})
    ours, theirs = both(tmp_path, "DebertaV2Tokenizer")
    same(ours, theirs, [text for text in TEXTS if text not in ENDS_IN_SPACE], PAIRS[:2])
    assert ours.mask_id == len(own)


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
    deberta = model_type == "deberta"
    same(ours, theirs, pairs=[] if deberta else PAIRS, types=not model_type.startswith("gpt"))
    saves(ours, tmp_path, model_type)


def test_one_sep_between_the_texts_of_deberta(shared_data, tmp_path):
    """transformers 5 writes two, and gives both texts the type 0; the models were trained with one."""
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
    folder = bytelevel(shared_data, tmp_path, special, config={"model_type": "deberta"})
    ours = load_tokenizer(folder)
    ids, types = ours.encode_for_model("the water", "the house")
    assert [ours.token(number) for number in ids] == [
        "[CLS]",
        "the",
        "Ġwater",
        "[SEP]",
        "the",
        "Ġhouse",
        "[SEP]",
    ]
    assert types == [0, 0, 0, 0, 1, 1, 1]


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


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("unigram", {}), ("bpe", {}), ("char", {}), ("unigram", IN_BYTES), ("bpe", IN_BYTES)],
)
def test_a_model_of_no_family(tmp_path, model_type, options):
    """SentencePiece's own ids and texts, read from the file alone or from its directory."""
    path = learn(tmp_path / "spm_char.model", model_type, **options)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    plain = [text for text in TEXTS if text != SPECIAL]
    for ours in (load_tokenizer(path), load_tokenizer(tmp_path)):
        assert ours.encode_batch(plain) == own.encode(plain)
        for text in plain:
            known = own.encode(text)
            if own.unk_id() not in known:
                assert ours.decode(known) == own.decode(known)


def test_a_model_of_whole_words_is_refused(tmp_path):
    path = learn(tmp_path / "spm.model", "word", vocab_size=60)
    with pytest.raises(InputError, match="a SentencePiece model of whole words, which is not supported"):
        load_tokenizer(path)
