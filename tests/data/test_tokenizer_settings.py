"""Settings that only tokenizer_config.json has: ids as transformers has them."""

import json
from pathlib import Path

import pytest
from tokenizers import normalizers, pre_tokenizers

from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.model_files import NORMAL, UNKNOWN, Pieces, pipeline
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat <s> sat", " the  mat", "<s>cat", "", "cat"]
LEARNT = [f"the cat sat on the mat {i}" for i in range(30)]


def saved(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def same(folder: Path) -> Tokenizer:
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode_for_model(text)[0] == theirs(text)["input_ids"], text
        assert (
            ours.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )
    return ours


BYTES = "GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"


@pytest.mark.parametrize("settings", [{"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("name", BYTES)
def test_a_space_before_texts_of_bytes(tmp_path, name, settings):
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=280), LEARNT)
    ours = same(saved(tmp_path, tokenizer, tokenizer_class=name, bos_token="<s>", **settings))
    expected = settings["add_prefix_space"] and name != "PreTrainedTokenizerFast"
    assert ours.token(ours.encode("cat")[0]).startswith("Ġ") == expected


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("form", ["Prepend", "Metaspace"])
def test_a_space_before_texts_of_llama(tmp_path, form, prefix):
    known = sorted({*"▁thecasonm<>"})
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{number:02X}>" for number in range(256)),
        *known,
        "▁t",
        "▁c",
        "at",
    ]
    kinds = [UNKNOWN, 3, 3, *[6] * 256, *[NORMAL] * (len(names) - 259)]
    scores = [-float(i) for i in range(len(names))]
    options = {"bytes_for_unknown": True, "tidy_spaces": False, "prefix": True}
    backend = pipeline(Pieces(names, scores, kinds, is_bpe=True, characters=b"", **options))
    if form == "Metaspace":
        backend.normalizer = normalizers.Sequence([])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    folder = saved(tmp_path, Tokenizer(backend), tokenizer_class="LlamaTokenizer", add_prefix_space=prefix)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the cat", "at", "cat the"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_special_tokens_that_are_split(tmp_path, algorithm):
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=280), LEARNT)
    mark = "<s>"
    for splits in (True, False):
        folder = saved(tmp_path / str(splits), tokenizer, split_special_tokens=splits)
        ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        number = ours.backend.token_to_id(mark)
        for text in (f"the {mark} cat", mark):
            ids = ours.encode_for_model(text)[0]
            assert ids == theirs(text)["input_ids"]
            assert (number in ids) is not splits
        again = load_tokenizer(ours.save(tmp_path / f"{splits} again").parent)
        assert again.encode_for_model(mark) == ours.encode_for_model(mark)
