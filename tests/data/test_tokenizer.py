"""Tokenizers keep text, ids and files: round trips for any text, and the formats people have."""

import json
import random
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.errors import InputError
from polyformer.data.rows.noising import add_sentinels
from polyformer.data.tokenizers import build_tokenizer, load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog barks.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "To be, or not to be: that is the question the fox asks the dog.",
] * 5
ALGORITHMS = ("bytes", "characters", "bpe", "wordpiece", "unigram")
SIZES = {"bytes": 260, "characters": 60, "bpe": 300, "wordpiece": 120, "unigram": 90}
NAIVE = "naïve Nguyễn: Việt Nam, fin\n"  # the same in NFC and NFKC


@pytest.fixture(scope="module")
def trained():
    return {
        name: Tokenizer.train(TokenizerConfig(algorithm=name, vocab_size=SIZES[name]), TEXTS)
        for name in ALGORITHMS
    }


@pytest.fixture(scope="module")
def as_written():
    return {
        name: Tokenizer.train(
            TokenizerConfig(algorithm=name, vocab_size=SIZES[name], normalization="none"), TEXTS
        )
        for name in ("bytes", "bpe")
    }


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@given(text=st.text())
def test_any_unicode_text_survives_bytes_and_bpe_that_normalise_nothing(as_written, name, text):
    tokenizer = as_written[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids & set(ids)


@given(text=st.text())
def test_byte_ids_are_the_bytes(as_written, text):
    assert as_written["bytes"].encode(text) == list(text.encode())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_decomposed_text_has_the_tokens_of_composed_text(name):
    config = TokenizerConfig(algorithm=name, vocab_size=400)
    texts = [unicodedata.normalize("NFD", text) for text in [*TEXTS, NAIVE]]
    tokenizer = Tokenizer.train(config, texts)
    ids = tokenizer.encode(NAIVE)
    assert tokenizer.encode(unicodedata.normalize("NFD", NAIVE)) == ids
    assert tokenizer.unk_id not in ids
    assert "ễ" in tokenizer.decode(ids)


def test_the_form_can_be_chosen_and_is_kept_in_the_file(tmp_path):
    text = "ﬁn ế"  # a ligature, and a letter with two accents
    for form in ("nfc", "nfd", "nfkc", "nfkd", "none"):
        tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes", normalization=form), [])
        tokenizer.save(tmp_path / form)
        expected = text if form == "none" else unicodedata.normalize(form.upper(), text)
        for loaded in (tokenizer, load_tokenizer(tmp_path / form)):
            assert loaded.decode(loaded.encode(text)) == expected
    with pytest.raises(InputError, match=r"normalization.*'nfx'"):
        TokenizerConfig.from_dict({"normalization": "nfx"})


def test_characters_are_the_most_frequent_ones():
    tokenizer = Tokenizer.train(
        TokenizerConfig(algorithm="characters", vocab_size=8), ["bbb a\n", "b a", "z"]
    )
    assert [tokenizer.token(i) for i in range(8)] == [
        "<pad>",
        "<s>",
        "</s>",
        "<mask>",
        "<unk>",
        " ",
        "a",
        "b",
    ]
    assert tokenizer.encode("ab z</s>") == [6, 7, 5, 4, 4, 4, 4, 4]
    assert tokenizer.decode([7, 5, 6, 6]) == "b aa"
    with pytest.raises(InputError, match="vocab_size: expected at least 6 for characters, got 5"):
        TokenizerConfig(algorithm="characters", vocab_size=5)


def test_a_loaded_tokenizer_normalises_as_it_always_did(trained, tmp_path):
    trained["bpe"].export(tmp_path)  # as GPT-2's files, in which nothing is said of normalisation
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("e\u0301")) == "e\u0301"


@pytest.mark.parametrize("name", ["characters", "wordpiece", "unigram"])
def test_words_seen_in_training_survive_the_others(trained, name):
    text = "the lazy fox asks"
    assert trained[name].decode(trained[name].encode(text)) == text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_special_tokens_are_never_found_in_a_text(trained, name):
    tokenizer = trained[name]
    for token in ("<pad>", "<s>", "</s>", "<mask>", "[CLS]", "[SEP]", "[MASK]", "[PAD]"):
        special = set(tokenizer.encode(f"fox{token}fox {token} ")) & tokenizer.special_ids
        assert special <= {tokenizer.unk_id}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_special_ids(trained, name):
    tokenizer = trained[name]
    assert len(tokenizer) <= SIZES[name]
    roles = ("pad", "bos", "eos", "cls", "sep", "mask")
    ids = {role: getattr(tokenizer, f"{role}_id") for role in roles}
    assert None not in ids.values()
    assert len({ids["pad"], ids["bos"], ids["eos"], ids["mask"]}) == 4
    assert (tokenizer.unk_id is None) == (name in ("bytes", "bpe"))
    assert sorted({*tokenizer.special_ids, *tokenizer.ordinary_ids.tolist()}) == list(range(len(tokenizer)))
    assert not np.isin(tokenizer.ordinary_ids, list(tokenizer.special_ids)).any()
    marked = [ids["bos"], *tokenizer.encode("the dog"), ids["eos"]]
    assert tokenizer.decode(marked) == "the dog"
    assert tokenizer.decode(marked, keep_special=True).startswith(tokenizer.token(ids["bos"]))


# Unigram does not: see Tokenizer.train
@pytest.mark.parametrize("name", ["bytes", "characters", "bpe", "wordpiece"])
def test_training_repeats(trained, name):
    again = Tokenizer.train(TokenizerConfig(algorithm=name, vocab_size=SIZES[name]), iter(TEXTS))
    assert json.loads(again.backend.to_str()) == json.loads(trained[name].backend.to_str())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_saving_and_loading_changes_nothing(trained, name, tmp_path):
    tokenizer = trained[name]
    file = tokenizer.save(tmp_path / "new")
    assert file == tmp_path / "new" / "tokenizer.json"
    for path in (file, tmp_path / "new"):
        assert_same(load_tokenizer(path), tokenizer)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_fingerprint_is_that_of_its_file(trained, name, tmp_path):
    """Also of Unigram, whose scores the library's own reader changes in the last digit."""
    tokenizer = trained[name]
    for _ in range(2):
        again = load_tokenizer(tokenizer.save(tmp_path))
        assert again.fingerprint == tokenizer.fingerprint
        assert again.backend.to_str() == tokenizer.backend.to_str()
        assert add_sentinels(again, 2).fingerprint == add_sentinels(tokenizer, 2).fingerprint
        tokenizer = again


def test_scores_are_read_as_they_are_stored(tmp_path):
    draw = random.Random(0)
    pieces = [("<unk>", 0.0), *((f"{number}", -20 * draw.random()) for number in range(1000))]
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0)).to_str())
    stored = json.loads(load_tokenizer(file).backend.to_str())["model"]["vocab"]
    assert stored == [list(piece) for piece in pieces]


def test_other_scores_are_another_unigram(trained, tmp_path):
    file = trained["unigram"].save(tmp_path)
    described = json.loads(file.read_text())
    described["model"]["vocab"][-1][1] -= 1e-9
    file.write_text(json.dumps(described))
    assert load_tokenizer(file).fingerprint != trained["unigram"].fingerprint


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("bytes", ["merges.txt", "vocab.json"]),
        ("bpe", ["merges.txt", "vocab.json"]),
        ("wordpiece", ["vocab.txt"]),
    ],
)
def test_the_algorithms_own_files_load_too(trained, name, files, tmp_path):
    files_written = trained[name].export(tmp_path)
    assert sorted(path.name for path in files_written) == files
    # the vocabulary has capitals, so that nothing is lowered, as in training
    assert_same(load_tokenizer(tmp_path), trained[name])


def assert_same(tokenizer, other):
    text = "The fox — Büsche, </s> 🦊\n<mask>"
    assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.decode(other.encode(text)) == other.decode(other.encode(text))
    assert tokenizer.special_ids == other.special_ids
    assert len(tokenizer) == len(other)


def test_unigram_has_no_files_of_its_own(trained, tmp_path):
    with pytest.raises(InputError, match="only BPE and WordPiece have files of their own; use save"):
        trained["unigram"].export(tmp_path)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lowercase(name, tmp_path):
    config = TokenizerConfig(algorithm=name, vocab_size=SIZES[name], lowercase=True)
    tokenizer = Tokenizer.train(config, TEXTS)
    assert tokenizer.encode("THE Fox") == tokenizer.encode("the fox")
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("THE Fox") == tokenizer.encode("the fox")


def test_a_vocabulary_without_capitals_lowers_text(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nfox\n##es\n")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    assert tokenizer.encode("Foxes Dog") == [2, 3, 1]
    assert load_tokenizer(tmp_path / "vocab.txt", lowercase=False).encode("Foxes") == [1]
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id, tokenizer.bos_id) == (0, 1, None, None)


def test_a_batch_is_its_texts(trained):
    texts = ["", "the fox", "a"]
    assert trained["bpe"].encode_batch(texts) == [trained["bpe"].encode(text) for text in texts]


def test_build_loads_or_trains(trained, tmp_path):
    trained["bpe"].save(tmp_path)
    loaded = build_tokenizer(TokenizerConfig(path=str(tmp_path)), [])
    assert_same(loaded, trained["bpe"])
    assert_same(build_tokenizer(TokenizerConfig(vocab_size=300), TEXTS), loaded)


def test_small_vocabularies_and_unknown_algorithms_are_refused():
    with pytest.raises(InputError, match="vocab_size: expected at least 260 for bpe, got 259"):
        TokenizerConfig(vocab_size=259)
    with pytest.raises(
        InputError, match="unknown algorithm 'sp': expected one of 'bpe', 'bytes', 'characters'"
    ):
        TokenizerConfig(algorithm="sp")
    config = TokenizerConfig(algorithm="unigram", vocab_size=500)
    assert TokenizerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_needs_text(texts):
    with pytest.raises(InputError, match="a tokenizer cannot be trained on no text"):
        Tokenizer.train(TokenizerConfig(), texts)


def test_a_vocabulary_too_small_is_said():
    with pytest.raises(InputError, match="vocab_size: 7 is too small for these texts"):
        Tokenizer.train(TokenizerConfig(algorithm="unigram", vocab_size=7), TEXTS)


def test_an_error_in_the_texts_stays_what_it_is():
    def texts():
        yield "fox"
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        Tokenizer.train(TokenizerConfig(), texts())


@pytest.mark.parametrize("text", ["a\ud800", None])
def test_a_text_of_half_characters_is_refused(trained, text):
    with pytest.raises(InputError, match="text: expected a string of whole Unicode characters, got"):
        trained["bpe"].encode(text)


def test_an_unknown_id_is_said(trained):
    with pytest.raises(InputError, match="id: expected 0 to 259, got 260"):
        trained["bytes"].token(260)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"model": {"type": "BPE"', b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer file, or a damaged one \("):
        load_tokenizer(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        InputError, match=r"nowhere: no such tokenizer; expected a tokenizer.json, a vocab.txt"
    ):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no tokenizer in this directory; expected one of tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"merges.txt: no such file; a vocab.json needs the merges"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("fox\n")
    with pytest.raises(InputError, match=r"vocab.txt: not a WordPiece vocabulary: it has no line \[UNK\]"):
        load_tokenizer(tmp_path)


def test_bert_as_published(shared_data):
    tokenizer = load_tokenizer(shared_data("tokenizers") / "bert-base-uncased-vocab.txt")
    assert len(tokenizer) == 30522
    assert (tokenizer.pad_id, tokenizer.unk_id) == (0, 100)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (101, 102, 103)
    assert tokenizer.encode("Hello, Wörld!") == tokenizer.encode("hello, world!") == [7592, 1010, 2088, 999]


def test_gpt2_as_published(shared_data):
    folder = shared_data("tokenizers")
    tokenizer = load_tokenizer(folder / "gpt2-encoder.json", merges=folder / "gpt2-vocab.bpe")
    assert len(tokenizer) == 50257
    assert tokenizer.bos_id == tokenizer.eos_id == 50256
    assert tokenizer.pad_id is None
    assert tokenizer.encode("Hello world") == [15496, 995]
    text = "don't <|endoftext|> 🦊\n\n  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
