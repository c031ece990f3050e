"""Weights that are cut off, missing, of the wrong shape or outside the folder: a named error."""

import json
import shutil
from itertools import cycle
from pathlib import Path

import pytest
import torch
from damage import edited, fails, indexed, reweighed, sharded
from safetensors.torch import load_file

import polyformer


def test_several_files_are_one(copy: Path):
    before = polyformer.from_pretrained(copy).state_dict()
    after = polyformer.from_pretrained(sharded(copy)).state_dict()
    assert len(list(copy.glob("model-*.safetensors"))) > 2
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], item) for name, item in before.items())


def test_weights_of_more_layers_than_the_config(copy: Path):
    layers = json.loads((copy / "config.json").read_text())["num_hidden_layers"]
    message = fails(edited(copy, num_hidden_layers=layers - 1))
    assert f"layers.{layers - 1}." in message.replace(f"layer.{layers - 1}.", f"layers.{layers - 1}.")
    assert "config.json describes a model of fewer layers" in message


@pytest.mark.parametrize("keep", [0, 7, 300, -100])
def test_truncated_weights(copy: Path, keep: int):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in fails(copy)


def test_truncated_shard(copy: Path):
    shard = sorted(sharded(copy).glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-50])
    assert shard.name in fails(copy)


def test_missing_shard(copy: Path):
    shard = sorted(sharded(copy).glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in fails(copy)


def test_missing_tensor(copy: Path):
    name = "bert.encoder.layer.1.output.dense.weight"
    assert name in fails(reweighed(copy, lambda tensors: tensors.pop(name)))


def test_unexpected_tensor_and_the_nearest_name(copy: Path):
    name = "bert.encoder.layer.1.output.densse.weight"
    message = fails(reweighed(copy, lambda tensors: tensors.update({name: torch.zeros(2)})))
    assert name in message
    assert "did you mean" in message


def test_misshapen_tensor(copy: Path):
    name = "bert.encoder.layer.0.attention.self.query.weight"
    message = fails(reweighed(copy, lambda tensors: tensors.update({name: torch.zeros(16, 15)})))
    assert name in message
    assert "(16, 15)" in message
    assert "(16, 16)" in message


def test_no_weights(copy: Path):
    (copy / "model.safetensors").unlink()
    assert "no weights" in fails(copy)


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ELSEWHERE = ("../other/model.safetensors", "{}", "a/../../other/x", "..", "", "a\\b", "a" * 300, "a\0b")


@pytest.mark.parametrize(("index", "name"), [*zip(cycle(INDEXES), ELSEWHERE)])
def test_an_index_names_files_of_its_own_folder_only(copy: Path, tmp_path: Path, name: str, index: str):
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    (copy / "model.safetensors").unlink()
    message = fails(indexed(copy, {"a": name.format(other / "model.safetensors")}, index), allow_pickle=True)
    assert "expected names of files in its own folder" in message
    assert len(message) < 1000


def test_an_index_follows_no_link_out_of_its_folder(copy: Path, tmp_path: Path):
    (copy / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (copy / "part.safetensors").symlink_to(tmp_path / "outside.safetensors")
    names = [*load_file(tmp_path / "outside.safetensors")]
    assert "a link to a file outside" in fails(indexed(copy, dict.fromkeys(names, "part.safetensors")))


def test_the_links_of_the_hubs_cache_are_followed(copy: Path, tmp_path: Path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    folder = copy.rename(cache / "snapshots" / "1234")
    (folder / "model.safetensors").rename(cache / "blobs" / "abcd")
    (folder / "part.safetensors").symlink_to("../../blobs/abcd")
    names = [*load_file(cache / "blobs" / "abcd")]
    assert polyformer.from_pretrained(indexed(folder, dict.fromkeys(names, "part.safetensors")))


@pytest.mark.parametrize("weight_map", [[], 3, None, {"a": 3}, {"a": ["b"]}, {"a": None}])
def test_an_index_of_anything_else(copy: Path, weight_map: object):
    assert "expected a 'weight_map'" in fails(indexed(copy, weight_map))
