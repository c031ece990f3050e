"""GGUF files that are damaged, or of what is not supported: one line that names the file and a way out."""

import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from damage import edited, fails

import polyformer
from gguf_files import Kind, write
from polyformer.core.errors import InputError
from polyformer.data import load_tokenizer
from polyformer.models.checkpoints.gguf import LAYER

WIDTH, HEADS, VOCAB = 32, 4, 24
VALUES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 16,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors(kind: Kind = Kind.Q8_0) -> dict[str, tuple[np.ndarray, Kind]]:
    matrix, vector = np.ones((WIDTH, WIDTH), np.float32), (np.ones(WIDTH, np.float32), Kind.F32)
    table = np.ones((VOCAB, WIDTH), np.float32)
    layers = {
        f"blk.{layer}.{part}.weight": vector if part.endswith("norm") else (matrix, kind)
        for layer in range(2)
        for part in LAYER
    }
    return {"token_embd.weight": (table, kind), "output_norm.weight": vector, **layers}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", "llama", VALUES, tensors(), {"bos_token_id": 1})


def test_the_file_is_whole(path: Path):
    assert polyformer.from_pretrained(path)(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_truncated(path: Path):
    """At any byte: never another exception, nor a long wait."""
    content = path.read_bytes()
    places = {0, 1, 3, 4, 23, 24, len(content) - 1, *random.Random(0).sample(range(len(content)), 150)}
    for place in sorted(places):
        path.write_bytes(content[:place])
        message = fails(path)
        assert message.startswith(f"{path}: ")
        assert "truncated" in message or "not a GGUF file" in message, message
        assert "\n" not in message


def test_any_byte_changed(path: Path):
    """What is in front of the tensors: refused by an `InputError`, or read."""
    content, draw = path.read_bytes(), random.Random(1)
    start = content.index(b"blk.1.ffn_down.weight") + 60
    for _ in range(400):
        place = draw.randrange(start)
        path.write_bytes(content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :])
        for read in (polyformer.from_pretrained, load_tokenizer):
            with suppress(InputError):
                read(path)


def test_lengths_without_end(path: Path):
    content = path.read_bytes()
    for place in (8, 16, 24):  # of tensors, of values, of the first name
        path.write_bytes(content[:place] + struct.pack("<Q", 2**62) + content[place + 8 :])
        assert "truncated" in fails(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": None}, "llama.attention.head_count is None, expected int"),
        ({"block_count": "2"}, "llama.block_count is '2', expected int"),
        ({"block_count": 0}, "llama.block_count is 0, expected 1 to 4096 layers"),
        (
            {"block_count": 10**6},
            "llama.block_count is 1000000, expected 1 to 4096 layers; download the file again",
        ),
        ({"block_count": 2**31}, "llama.block_count is 2147483648, expected 1 to 4096 layers"),
        ({"block_count": 3}, "the tensor 'blk.2.attn_norm.weight' of 3 layers is missing; download it again"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base is nan, expected float"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count is 4, and only 8 is supported, all ch"),
        ({"expert_count": 8}, "llama.expert_count is 8, and only 0 is supported"),
        ({"logit_scale": 2.0}, "llama.logit_scale is 2.0, an option that is not supported"),
        ({"rope.scaling.type": "longrope"}, ": rope_parameters of type 'longrope' lack 'short_factor'"),
        ({"rope.scaling.type": "strange"}, ": rope_type is 'strange', and only default, linear"),
        ({"attention.head_count": 0}, ": num_attention_heads is 0, expected an integer from 1"),
        ({"attention.head_count": [4, 4]}, "llama.attention.head_count is [4, 4], expected int"),
        ({"feed_forward_length": 64}, "makes 'decoder.layers.0.feedforward.gate.weight' of shape (32, 32)"),
    ],
)
def test_values(changes: dict[str, Any], message: str, tmp_path: Path):
    values = {name: value for name, value in {**VALUES, **changes}.items() if value is not None}
    path = write(tmp_path / "model.gguf", "llama", values, tensors())
    assert message in fails(path)
    assert str(path) in fails(path)


def test_other_architectures(tmp_path: Path):
    path = write(tmp_path / "model.gguf", "mamba", VALUES, tensors())
    assert fails(path).startswith(
        f"{path}: general.architecture is 'mamba', and only llama, mistral, qwen2 are supported"
    )


def test_unknown_numbers(path: Path):
    name = b"blk.1.ffn_down.weight"
    content = path.read_bytes()
    place = content.index(name) + len(name) + 4 + 16
    path.write_bytes(content[:place] + struct.pack("<I", 999) + content[place + 4 :])
    assert fails(path).startswith(
        f"{path}: unknown quantization type 999 in 'blk.1.ffn_down.weight'; a newer"
    )


@pytest.mark.parametrize("missing", ["blk.1.attn_q.weight", "output_norm.weight"])
def test_missing_tensor(missing: str, tmp_path: Path):
    left = {name: tensor for name, tensor in tensors().items() if name != missing}
    path = write(tmp_path / "model.gguf", "llama", VALUES, left)
    assert fails(path) == f"{path}: the tensor '{missing}' of 2 layers is missing; download it again"


def test_missing_table_and_strange_tensor(tmp_path: Path):
    left = {name: tensor for name, tensor in tensors().items() if name != "token_embd.weight"}
    path = write(tmp_path / "model.gguf", "llama", VALUES, left)
    assert "no table of tokens (token_embd.weight)" in fails(path)
    extra = {**tensors(), "blk.0.ffn_gate_inp.weight": tensors()["blk.0.attn_q.weight"]}
    path = write(tmp_path / "other.gguf", "llama", VALUES, extra)
    assert "unknown tensor in the checkpoint 'blk.0.ffn_gate_inp.weight'" in fails(path)


def test_other_frequencies(tmp_path: Path):
    factors = np.array([1, 1, 2, 8], np.float32)
    path = write(
        tmp_path / "model.gguf", "llama", VALUES, {**tensors(), "rope_freqs.weight": (factors, Kind.F32)}
    )
    assert f"{path}: the frequencies in rope_freqs.weight are not those of Llama 3.1" in fails(path)


def test_several_files(path: Path):
    write(path.with_name("other.gguf"), "llama", VALUES, tensors())
    assert f"{path.parent}: it has 2 GGUF files (model.gguf, other.gguf); name the one" in fails(path.parent)
    with pytest.raises(InputError, match="it has 2 GGUF files"):
        load_tokenizer(path.parent)


def test_another_version(path: Path):
    content = path.read_bytes()
    for version in (b"\1\0\0\0", b"\0\0\0\3"):
        path.write_bytes(content[:4] + version + content[8:])
        assert "and only 2 and 3 are supported; convert the model again" in fails(path)


def test_code_of_its_own_is_not_run(copy: Path):
    """A folder whose configuration names code: the refusal says so, and nothing of it is imported."""
    (copy / "modeling_own.py").write_text("raise SystemExit('this was run')")
    edited(copy, model_type="own", auto_map={"AutoModel": "modeling_own.OwnModel"})
    message = fails(copy)
    assert message.startswith(
        "config.json: model_type 'own' is not supported, and custom code (auto_map) is never run; "
    )
    edited(copy, model_type="bert")
    assert polyformer.from_pretrained(copy).config.head.kind  # the family's own class
