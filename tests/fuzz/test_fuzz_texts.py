"""Recipes, own data and tokenizers' files with anything in them."""

import itertools
import json
import struct
from pathlib import Path

import pytest
import yaml
from hostile import cases, changed_bytes, changed_data, changed_json, changed_text, survives
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.parsing import dump_yaml
from polyformer.data.formats.readers import READERS
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
from polyformer.training.recipes.recipe import Recipe, find_recipe, recipe_names, recipe_text

ASKED = {"id": "1", "question": "q", "answers": [{"text": "b", "answer_start": 2}]}
SQUAD = {"data": [{"paragraphs": [{"context": "a b", "qas": [ASKED]}]}]}
FILES = {
    "text": b"A text.\nIn two lines.\n",
    "lines": b"one\n\ntwo\n",
    "paragraphs": b"a\nb\n\n\nc\n",
    "articles": b" = A = \n\n text\n\n = B = \n\n more\n",
    "jsonl": b'{"text": "a", "label": 1}\n{"text": "b \\u00e9", "label": null}\n',
    "csv": b'text,label\n"a ""quoted"", text",x\nb,y\n',
    "tsv": b"text\tlabel\na\tx\nb\ty\n",
    "conll": b"-DOCSTART- O\n\nEU B-ORG\nrejects O\n\nGerman B-MISC\n",
    "idx": struct.pack(">IIII", 0x803, 3, 4, 5) + bytes(range(60)),
    "squad": json.dumps(SQUAD).encode(),
}
RECIPES = {name: recipe_text(name) for name in recipe_names()}


def read(kind: str, path: Path) -> None:
    for _ in itertools.islice(READERS[kind](path, None), 1000):
        pass


@cases(200)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_own_data(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject):
    path = tmp_path_factory.getbasetemp() / "data"
    path.write_bytes(data.draw(changed_bytes(FILES[kind], 80)))
    survives(lambda: read(kind, path))


@cases(60)
@given(st.sampled_from(["jsonl", "squad"]), st.data())
def test_own_data_in_json(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject):
    row = SQUAD if kind == "squad" else {"text": "a", "label": 1, "more": [1, {"a": None}]}
    path = tmp_path_factory.getbasetemp() / "data.json"
    path.write_bytes(data.draw(changed_json(json.dumps(row))))
    survives(lambda: read(kind, path))


@cases(100)
@given(st.data())
def test_recipes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    text = RECIPES[data.draw(st.sampled_from(sorted(RECIPES)))]
    if data.draw(st.booleans()):
        text = dump_yaml(data.draw(changed_data(yaml.safe_load(text))))
    else:
        text = data.draw(changed_text(text))
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    survives(lambda: Recipe.from_dict(find_recipe(str(path))).model.config())


TEXTS = ["the quick brown fox", "jumps over the lazy dog"] * 5


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers' folders: one tokenizer.json of each algorithm, and the files of BERT and of GPT-2."""
    root = tmp_path_factory.mktemp("tokenizers")
    for algorithm in ("bytes", "bpe", "wordpiece", "unigram"):
        config = TokenizerConfig(algorithm=algorithm, vocab_size=300)
        Tokenizer.train(config, TEXTS).save(root / algorithm)
    (root / "bert").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "dog"]
    (root / "bert" / "vocab.txt").write_text("\n".join(words))
    (root / "gpt2").mkdir()
    bpe = Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=300), TEXTS)
    bpe.backend.model.save(str(root / "gpt2"))
    settings = {"do_lower_case": True, "unk_token": "[UNK]", "additional_special_tokens": ["<x>"]}
    settings |= {"added_tokens_decoder": {"5": {"content": "fox"}}, "tokenizer_class": "BertTokenizer"}
    write(root / "bert", tokenizer_config=settings, special_tokens_map={"mask_token": {"content": "[MASK]"}})
    write(root / "gpt2", tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}, added_tokens={"<x>": 300})
    return {path.name: path for path in root.iterdir()}


@cases(150)
@given(st.data())
def test_tokenizers(tokenizers: dict[str, Path], data: st.DataObject):
    folder = tokenizers[data.draw(st.sampled_from(sorted(tokenizers)))]
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    before = path.read_bytes()
    if path.suffix == ".json":
        changed = data.draw(changed_json(before.decode()))
    else:
        changed = data.draw(changed_text(before.decode())).encode("utf-8", "replace")
    path.write_bytes(changed)
    try:
        survives(lambda: load_tokenizer(folder).encode("the fox"))
    finally:
        path.write_bytes(before)
