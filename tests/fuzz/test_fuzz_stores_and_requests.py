"""Indexes of stores, heads of GGUF, bytes of Parquet, what was attached, and sizes that are asked for."""

import dataclasses
import itertools
import json
import typing
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from hostile import VALUES, cases, changed_bytes, changed_data, changed_json, survives
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from torch import nn

import polyformer
from gguf_files import Kind, write
from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.readers import Reading
from polyformer.applications.retrieval.search import IndexConfig, make_index
from polyformer.applications.retrieval.store import open_folder
from polyformer.cli.commands import load_command, options_class
from polyformer.cli.commands.options import flag, parse
from polyformer.data.formats.readers import read_parquet
from polyformer.models.attached.attach_settings import restore
from polyformer.models.checkpoints.gguf import LAYER
from polyformer.models.generation.config import SETTING_PATHS, GenerationConfig, with_settings

COUNT, WIDTH = 10_000, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an index."""
    pytest.importorskip("faiss")
    folder = tmp_path_factory.mktemp("store")
    keys = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype("f2")
    keys.tofile(folder / "keys.float16")
    np.zeros(COUNT, np.int32).tofile(folder / "values.int32")
    about: Any = {"model": "m", "tokenizer": "t", "key": "feedforward", "reading": Reading(), "text": ()}
    manifest = Manifest(dimension=WIDTH, count=COUNT, **about)
    manifest.write(folder)
    make_index(folder, manifest, keys, IndexConfig(lists=8, neighbours=10))
    return folder


def opened(file: Path, content: bytes) -> None:
    """Open the store with this content in one of its files, and search in it.

    The file is another one each time: an index that is still mapped must not lose its pages.
    """
    before = file.read_bytes()
    replaced(file, content)
    try:
        open_folder(file.parent).search(torch.zeros(1, WIDTH), 3)
    finally:
        replaced(file, before)


def replaced(file: Path, content: bytes) -> None:
    """Put a new file in the place of an old one."""
    new = file.with_name("new")
    new.write_bytes(content)
    new.replace(file)


@cases(60)
@given(st.data())
@pytest.mark.parametrize("name", ["index.json", "store.json"])
def test_descriptions_of_stores(store: Path, name: str, data: st.DataObject):
    content = data.draw(changed_json((store / name).read_text()))
    survives(lambda: opened(store / name, content))


@cases(60)
@given(st.data())
def test_indexes_of_stores(store: Path, data: st.DataObject):
    """By chance also with the checksum that goes with them, as a stranger's store may have it."""
    content = data.draw(changed_bytes((store / "index.faiss").read_bytes(), 2000))
    before = (store / "index.json").read_text()
    if data.draw(st.booleans()):
        about = {**json.loads(before), "checksum": zlib.crc32(content)}
        (store / "index.json").write_text(json.dumps(about))
    survives(lambda: opened(store / "index.faiss", content))
    (store / "index.json").write_text(before)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer."""
    pytest.importorskip("gguf")
    names = ("block_count", "context_length", "embedding_length", "feed_forward_length")
    values: dict[str, Any] = dict(zip(names, (1, 16, 32, 32)))
    values |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    vector, matrix = np.ones(32, np.float32), np.ones((32, 32), np.float32)
    tensors = {
        f"blk.0.{part}.weight": (vector if part.endswith("norm") else matrix, Kind.F32) for part in LAYER
    }
    outer = {"token_embd.weight": (matrix, Kind.F32), "output_norm.weight": (vector, Kind.F32)}
    return write(tmp_path_factory.mktemp("gguf") / "a.gguf", "llama", values, {**outer, **tensors}, {})


@cases(100)
@given(st.data())
def test_heads_of_gguf(gguf: Path, data: st.DataObject):
    whole = gguf.read_bytes()
    content = data.draw(changed_bytes(whole, whole.index(b"blk.0.ffn_down.weight") + 60))
    path = gguf.with_name("changed.gguf")
    path.write_bytes(content)
    survives(lambda: polyformer.from_pretrained(path))


@pytest.fixture(scope="module", params=["zstd", "none"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, numbers and lists."""
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    rows = {"text": ["a b", "c"] * 30, "label": [*range(60)], "tokens": [["x", "y"], None] * 30}
    parquet.write_table(pa.table(rows), path, compression=request.param)
    return path


@cases(100)
@given(st.data())
def test_bytes_of_parquet(table: Path, data: st.DataObject):
    whole = table.read_bytes()
    ends = data.draw(st.booleans())  # what describes the file is at its end
    changed = data.draw(changed_bytes(whole[::-1] if ends else whole, len(whole)))
    path = table.with_name("changed.parquet")
    path.write_bytes(changed[::-1] if ends else changed)
    survives(lambda: [*itertools.islice(read_parquet(path), 1000)])


SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
BERT = transformers.BertModel(transformers.BertConfig(vocab_size=20, **SIZES))
CALLS = [
    {"attention": "Window(4) | Global(1)", "layers": [0, "encoder"], "position": {"kind": "alibi"}},
    {"attention": None, "layers": None, "position": "t5(num_buckets=32)", "functions": ["mine"]},
]


@cases(100)
@given(changed_data(CALLS) | st.sampled_from(VALUES))
def test_what_was_attached(calls: Any):
    for model in (BERT, nn.Linear(2, 2)):
        config = SimpleNamespace(polyformer_attention=calls, _attn_implementation="polyformer")
        model.__dict__["config"] = config
        survives(lambda model=model: restore(model))


NUMBERS = (0, 1, -1, 3, 2**20, 2**24 + 1, 10**9, 2**31, 2**63, -(2**63), 10**30, 1.5, float("nan"), None, "x")


@cases(100)
@given(
    st.dictionaries(st.sampled_from(sorted(SETTING_PATHS)), st.sampled_from(NUMBERS), min_size=1, max_size=3)
)
def test_settings_that_are_asked_for(settings: dict[str, Any]):
    survives(lambda: with_settings(GenerationConfig(), settings).lengths(4))


COMMANDS = ("generate", "explore", "convert", "embed", "evaluate", "calibrate", "prompt", "spectrum", "show")


@cases(60)
@given(st.sampled_from(COMMANDS), st.data())
def test_sizes_on_the_command_line(command: str, data: st.DataObject):
    """No option may ask for more than its limit: none reaches the command with a larger number."""
    loaded = load_command(command)
    cls = options_class(loaded)
    hints = typing.get_type_hints(cls)
    numbers = [field for field in dataclasses.fields(cls) if hints[field.name] in (int, int | None)]
    field, number = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from(NUMBERS))
    words = ["x", "y", flag(field), json.dumps(number)]

    def asked() -> None:
        value = getattr(parse(command, loaded, words), field.name)
        assert value is None or value <= field.metadata["most"]

    survives(asked)
