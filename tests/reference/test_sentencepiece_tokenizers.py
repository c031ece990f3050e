"""Tokenizers of SentencePiece models give transformers' own ids: each family's files, saved and loaded.

The models are learned here, small, from texts in several scripts. For a model of no family the reference is
SentencePiece itself.
"""

import io
from pathlib import Path

import pytest
from tokenizer_cases import LEARNT, TEXTS, both, same, saves, write

from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

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
SPECIAL = TEXTS[10]


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
def test_families_with_pieces_in_the_order_of_the_model(tmp_path, name, file, model_type, options, table):
    learn(tmp_path / file, model_type, normalization_rule_name=table, **options)
    ours, theirs = both(write(tmp_path, tokenizer_config={"tokenizer_class": name}), name)
    same(ours, theirs)
    saves(ours, tmp_path, "reformer")


def test_deberta_v2_adds_its_mask_and_splits_at_punctuation(tmp_path):
    path = learn(tmp_path / "spm.model", normalization_rule_name="identity", **DEBERTA)
    size = len(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    config = {"do_lower_case": True, "split_by_punct": True}
    write(
        tmp_path, tokenizer_config=config, added_tokens={"[MASK]": size}, config={"model_type": "deberta-v2"}
    )
    ours, theirs = both(tmp_path, "DebertaV2Tokenizer")
    same(ours, theirs)
    assert ours.mask_id == size


def test_xlnet_ends_in_its_class_token(tmp_path):
    """Its type is 2, that of padding 3."""
    symbols = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    learn(tmp_path / "spiece.model", control_symbols=symbols)
    ours, theirs = both(
        write(
            tmp_path, config={"model_type": "xlnet"}, tokenizer_config={"tokenizer_class": "XLNetTokenizer"}
        ),
        "XLNetTokenizer",
    )
    same(ours, theirs)
    saves(ours, tmp_path, "xlnet")
    assert ours.encode_for_model("the fox")[0][-2:] == [ours.sep_id, ours.cls_id]


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
