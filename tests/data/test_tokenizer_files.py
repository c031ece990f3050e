"""The tokenizer files of checkpoints: roles and settings are read, what is wrong is said by name."""

import json
import pickle
import sys

import pytest

from polyformer.core.errors import InputError
from polyformer.data.tokenizers import load_tokenizer, pipelines
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<x>", "fox", "Dog", "dog", "##s", "x", "<", ">"]
TEXTS = ["the quick brown fox jumps over the lazy dog"] * 3


@pytest.fixture
def bert(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    write(tmp_path, tokenizer_config={"tokenizer_class": "BertTokenizerFast", "do_lower_case": False})
    return tmp_path


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def tokens(tokenizer, *texts, **options):
    return [tokenizer.token(number) for number in tokenizer.encode_for_model(*texts, **options)[0]]


def test_settings_are_read(bert):
    assert tokens(load_tokenizer(bert), "Dogs") == ["[CLS]", "Dog", "##s", "[SEP]"]
    write(bert, tokenizer_config={"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    assert tokens(load_tokenizer(bert), "Dogs") == ["[CLS]", "dog", "##s", "[SEP]"]
    assert tokens(load_tokenizer(bert, lowercase=False), "Dogs")[1] == "Dog"


def test_roles_and_added_tokens(bert):
    special_tokens = {"cls_token": {"content": "<x>", "lstrip": True}, "pad_token": None}
    write(bert, special_tokens_map=special_tokens, added_tokens={"[NEW]": 13})
    tokenizer = load_tokenizer(bert)
    assert (tokenizer.cls_id, tokenizer.pad_id, len(tokenizer)) == (5, None, 14)
    assert tokens(tokenizer, "fox[NEW]", "dog  <x>") == [
        "<x>",
        "fox",
        "[NEW]",
        "[SEP]",
        "dog",
        "<x>",
        "[SEP]",
    ]
    assert 5 not in tokenizer.encode("<x>")
    again = load_tokenizer(tokenizer.save(bert / "saved").parent)
    assert again.roles == tokenizer.roles
    assert again.encode_for_model("fox[NEW]", "<x>") == tokenizer.encode_for_model("fox[NEW]", "<x>")


def test_added_tokens_by_id_prevail_over_the_map(bert):
    """A token that a special_tokens_map.json renames is the one that added_tokens_decoder numbers."""
    config = {
        "tokenizer_class": "BertTokenizer",
        "mask_token": "<x>",
        "added_tokens_decoder": {"5": {"content": "<x>", "lstrip": True, "special": True}},
    }
    write(bert, tokenizer_config=config, special_tokens_map={"mask_token": "[MASK]"})
    tokenizer = load_tokenizer(bert)
    assert tokenizer.mask_id == 5
    assert tokens(tokenizer, "fox <x>") == ["[CLS]", "fox", "<x>", "[SEP]"]


def test_a_token_with_another_id_than_its_files_say(bert):
    write(bert, added_tokens={"[NEW]": 17})
    with pytest.raises(InputError, match=r"'\[NEW\]' should have the id 17, but its files give 13"):
        load_tokenizer(bert)


def test_a_template_needs_its_tokens(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\nfox")
    assert load_tokenizer(tmp_path).encode_for_model("fox", "fox")[0] == [1, 1]


def test_a_tokenizer_trained_here_adds_no_special_tokens(tmp_path):
    """Also after saving, whatever model lies beside it."""
    tokenizer = Tokenizer.train(TokenizerConfig(vocab_size=290), TEXTS)
    write(tokenizer.save(tmp_path).parent, config={"model_type": "roberta"})
    for loaded in (tokenizer, load_tokenizer(tmp_path)):
        assert loaded.encode_for_model("the fox") == (tokenizer.encode("the fox"), [0, 0])
        assert loaded.encode_for_model("<mask>")[0] == [tokenizer.mask_id]


def test_a_batch_needs_a_pair_for_each(bert):
    tokenizer = load_tokenizer(bert)
    with pytest.raises(InputError, match="pairs: expected one for each of 2 texts, got 1"):
        tokenizer.encode_batch_for_model(["a", "b"], ["c"])
    with pytest.raises(InputError, match="text: expected a string of whole Unicode characters, got None"):
        tokenizer.encode_batch_for_model(["a", "b"], ["c", None])


def test_languages_are_for_those_who_have_them(bert):
    with pytest.raises(InputError, match="language: this tokenizer has no tokens of languages, got 'en'"):
        load_tokenizer(bert).encode_for_model("fox", language="en")
    write(bert, special_tokens_map={"cls_token": "__en__", "additional_special_tokens": ["__fr__"]})
    tokenizer = load_tokenizer(bert)
    assert tokens(tokenizer, "fox", language="fr") == ["__fr__", "fox", "[SEP]"]
    with pytest.raises(InputError, match="unknown language 'xx': expected one of 'en', 'fr'"):
        tokenizer.encode_for_model("fox", language="xx")


@pytest.mark.parametrize("number", [-1, 13, 10**12])
def test_ids_outside_the_vocabulary(bert, number):
    tokenizer = load_tokenizer(bert)
    with pytest.raises(InputError, match=f"id: expected 0 to 12, got {number}"):
        tokenizer.decode([6, number])


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "vocab.pkl"])
def test_a_pickle_is_refused(tmp_path, name):
    class Trap:
        def __reduce__(self):
            return sys.exit, ("it was run",)

    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match=f"{name} is a pickle, whose reading can run code, so it is refused"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("bert", "no vocab.txt in it, which BertTokenizer needs"),
        ("roberta", "no vocab.json in it, which RobertaTokenizer needs"),
        ("ctrl", "no vocab.json in it, which CTRLTokenizer needs"),
        ("t5", "no spiece.model in it, which T5Tokenizer needs"),
        ("m2m_100", "no vocab.json in it, which M2M100Tokenizer needs"),
        ("transfo-xl", "no vocab.txt in it, which a tokenizer of words needs"),
    ],
)
def test_a_missing_file_is_named(tmp_path, model_type, missing):
    write(tmp_path, config={"model_type": model_type})
    with pytest.raises(InputError, match=missing):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "openai-gpt", "ctrl", "xlm"])
def test_merges_must_lie_beside(tmp_path, model_type):
    write(tmp_path, config={"model_type": model_type}, vocab={"<unk>": 0, "a": 1})
    with pytest.raises(InputError, match=r"no merges\.txt in it, which .*Tokenizer needs"):
        load_tokenizer(tmp_path)


def test_old_merges_need_a_family(tmp_path):
    write(tmp_path, vocab={"<unk>": 0, "a": 1, "b</w>": 2, "ab</w>": 3})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    with pytest.raises(InputError, match="words that end by </w>, as in GPT, CTRL and XLM; which of them"):
        load_tokenizer(tmp_path)


def test_an_unknown_class_is_named(bert):
    write(bert, tokenizer_config={"tokenizer_class": "OtherTokenizerFast"})
    with pytest.raises(InputError, match="transformers has no tokenizer OtherTokenizer; save it as"):
        load_tokenizer(bert)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
@pytest.mark.parametrize("damage", [b'{"a": ', b"[1]", b"\xff"])
def test_damaged_settings_are_named(bert, name, damage):
    (bert / name).write_bytes(damage)
    with pytest.raises(InputError, match=rf"{name}(: not JSON|: expected an object)"):
        load_tokenizer(bert)


def test_a_special_token_that_is_none(bert):
    write(bert, special_tokens_map={"cls_token": 3})
    with pytest.raises(InputError, match="special token: expected a string or an object with its content"):
        load_tokenizer(bert)


def test_an_added_token_without_a_number(bert):
    write(bert, tokenizer_config={"added_tokens_decoder": {"one": {"content": "<x>"}}})
    with pytest.raises(InputError, match=r"not a tokenizer, or a damaged one \(invalid literal for int"):
        load_tokenizer(bert)


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"a": 1, "b": 1}', b'{"a": "0"}', b'{"a": 1.0}'])
def test_a_damaged_vocabulary_is_named(tmp_path, damage):
    write(tmp_path, config={"model_type": "ctrl"})
    (tmp_path / "vocab.json").write_bytes(damage)
    (tmp_path / "merges.txt").write_text("#version\n")
    with pytest.raises(InputError, match=r"vocab.json:"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not a model", b"\x0a\xff\xff", b"\x0a\x05\x0a\x03abc"])
def test_a_damaged_model_is_named(tmp_path, damage):
    pytest.importorskip("sentencepiece")
    (tmp_path / "spiece.model").write_bytes(damage)
    for path in (tmp_path, tmp_path / "spiece.model"):
        with pytest.raises(InputError, match=r"spiece.model: not a SentencePiece model, or a damaged one"):
            load_tokenizer(path)


def test_the_extras_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "spiece.model").write_bytes(b"x")
    with pytest.raises(InputError, match=r"pip install 'polyformer\[sentencepiece\]'"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.models.auto", None)
    write(tmp_path, config={"model_type": "t5"})
    with pytest.raises(InputError, match=r"needs transformers to be read; pip install 'polyformer\[hub\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("number", [1, -1, 2**33, 1.5, "1", None, [0]])
def test_ids_of_bpe_are_numbers_each_once(tmp_path, number):
    """Two tokens of one id were read as one, and texts with the other came back as something else."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    vocab = {"a": 0, "b": 1, "c": 2}
    for changed, ok in ((vocab, True), ({**vocab, "c": number}, False)):
        (tmp_path / "vocab.json").write_text(json.dumps(changed))
        if ok:
            assert len(load_tokenizer(tmp_path)) == 3
        else:
            with pytest.raises(InputError, match=r"vocab.json: expected tokens with ids from 0 to"):
                load_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_a_damaged_file(tmp_path):
    """A merge shorter than the prefix of the pieces inside words, which the library cuts off unseen."""
    Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=270), TEXTS).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"]["continuing_subword_prefix"] = "####"
    path.write_text(json.dumps(described))
    for source in (path, tmp_path):
        with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer file, or a damaged one"):
            load_tokenizer(source)


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interruption_while_reading_is_none_of_the_file(signal, tmp_path):
    with pytest.raises(signal), pipelines.reading(tmp_path):
        raise signal


def test_words_of_transformer_xl_are_read_from_text_and_never_from_a_pickle(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "transfo-xl"}')
    (tmp_path / "vocab.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(InputError, match=r"vocab\.bin is a pickle"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("<eos>\nthe 9\n@,@\n<unk>\ncat\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the cat sat @,@") == [1, 4, 3, 2]
    (tmp_path / "vocab.txt").write_text("the\n")
    with pytest.raises(InputError, match="no <unk> in it"):
        load_tokenizer(tmp_path)
