"""Pickled weights: refused unless allowed, then read as tensors by name, and nothing in them is executed."""

import pickle
from pathlib import Path

import pytest
import torch
from damage import fails
from safetensors.torch import load_file

import polyformer


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_nothing_in_it_runs(copy: Path):
    (copy / "model.safetensors").unlink()
    mark = copy / "ran"
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"bert.x": Bomb(mark)}))
    assert "is a pickle" in fails(copy)
    assert "pytorch_model.bin" in fails(copy, allow_pickle=True)
    torch.save({"bert.x": Bomb(mark)}, copy / "pytorch_model.bin")
    assert "refused" in fails(copy, allow_pickle=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "holds a list"),
        ({1: torch.ones(1)}, "under 1"),
        ({"a": 3}, "holds a int under 'a'"),
        ({"a": {"b": torch.ones(1)}}, "holds a dict under 'a'"),
        ({"a": torch.ones(2).to_sparse()}, "holds a tensor (torch.sparse_coo)"),
        (torch.nn.Linear(1, 1), "contains more than tensors and is refused: torch.nn.modules.linear.Linear"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_anything_but_tensors_by_name(copy: Path, content: object, said: str, zipped: bool):
    (copy / "model.safetensors").unlink()
    torch.save(content, copy / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    message = fails(copy, allow_pickle=True)
    assert said in message
    assert "weights_only" not in message, "no advice to run it all the same"


@pytest.mark.parametrize("content", [b"", b"\x80\x02junk", b"PK\x03\x04junk", b"junk", pickle.dumps([1])])
def test_a_pickle_that_is_none(copy: Path, content: bytes):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin" in fails(copy, allow_pickle=True)


def test_a_pickle_under_the_name_of_safetensors(copy: Path):
    torch.save({"a": torch.ones(1)}, copy / "model.safetensors")
    assert "is a pickle" in fails(copy)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_file_of_tensors_where_it_is_allowed(copy: Path, zipped: bool):
    expected = polyformer.from_pretrained(copy).state_dict()
    tensors = load_file(copy / "model.safetensors")
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        for new, before in renamed.items():
            name = name.replace(new, before)
        old[name] = tensor
    (copy / "model.safetensors").unlink()
    torch.save(old, copy / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    actual = polyformer.from_pretrained(copy, allow_pickle=True).state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
