"""Checkpoints that are damaged, foreign or unsafe: a named error, nothing executed. Real files, corrupted."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyformer
from polyformer.checkpoints.family import FAMILIES
from polyformer.core.errors import InputError
from polyformer.presets import create_model

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 20,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small BERT as transformers would have saved it."""
    folder = tmp_path_factory.mktemp("bert")
    create_model("bert-base", **SIZES).save_pretrained(folder, format="hub")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def fails(folder: Path, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        polyformer.from_pretrained(folder, **options)  # type: ignore[arg-type]
    return str(caught.value)


def edited(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def reweighed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded(folder: Path) -> Path:
    from polyformer.checkpoints.save import save

    model = polyformer.from_pretrained(folder)
    save(model, folder, shard_size=4000)
    assert not (folder / "model.safetensors").exists()
    return folder


def test_several_files_are_one(copy: Path):
    before = polyformer.from_pretrained(copy).state_dict()
    after = polyformer.from_pretrained(sharded(copy)).state_dict()
    assert len(list(copy.glob("model-*.safetensors"))) > 2
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], item) for name, item in before.items())


def test_unknown_model_type(copy: Path):
    message = fails(edited(copy, model_type="bret"))
    assert "model_type 'bret' is not supported; did you mean 'bert'" in message


def test_a_family_that_is_not_ours_is_named_before_its_weights_are_missed(copy: Path):
    (copy / "model.safetensors").unlink()
    message = fails(edited(copy, model_type="llama"))
    assert "model_type 'llama' is not supported" in message
    assert "gpt2" in message
    with pytest.raises(InputError, match="model_type 'llama' is not supported"):
        polyformer.checkpoints.config_of(copy)


def test_a_file_where_a_directory_is_expected(tmp_path: Path):
    for name, said in (("model.gguf", "GGUF is not supported"), ("a.safetensors", "this is a file")):
        (tmp_path / name).write_bytes(b"GGUF")
        assert said in fails(tmp_path / name)
        assert "expected a directory" in fails(tmp_path / name)


def test_unknown_architecture(copy: Path):
    message = fails(edited(copy, architectures=["BertForMaskedLN"]))
    assert "BertForMaskedLN" in message
    assert "BertForMaskedLM" in message


def test_an_option_that_is_not_supported(copy: Path):
    message = fails(edited(copy, position_embedding_type="relative_key"))
    assert (
        message == "config.json: position_embedding_type is 'relative_key', and only 'absolute' is supported"
    )


def test_unknown_activation(copy: Path):
    assert "hidden_act" in fails(edited(copy, hidden_act="geglu"))


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


def test_config_of_another_size(copy: Path):
    message = fails(edited(copy, intermediate_size=48))
    assert "(24, 16)" in message
    assert "(48, 16)" in message


def test_damaged_config(copy: Path):
    (copy / "config.json").write_text('{"model_type": "be')
    assert "config.json: not JSON" in fails(copy)


def test_no_weights(copy: Path):
    (copy / "model.safetensors").unlink()
    assert "no weights" in fails(copy)


def test_no_directory(tmp_path: Path):
    assert "no such directory" in fails(tmp_path / "nowhere")
    assert "not a model directory" in fails(tmp_path)


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
        (torch.nn.Linear(1, 1), "holds more than tensors and is refused: torch.nn.modules.linear.Linear"),
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


def test_another_head_starts_fresh_and_says_so(copy: Path):
    expected = polyformer.from_pretrained(copy)
    with pytest.warns(UserWarning, match="newly initialized: head.dense.weight"):
        model = polyformer.from_pretrained(copy, head="BertForSequenceClassification")
    assert model.config.head.kind == "classify"
    assert torch.equal(model.tokens.weight, expected.tokens.weight)
    assert bool(model.get_parameter("head.output.weight").isfinite().all())
    assert "did you mean" in fails(copy, head="BertForSequenceClasification")


def test_a_model_of_no_family_is_refused(tmp_path: Path):
    model = create_model("bert-base", **SIZES, attention=polyformer.Window(3))
    with pytest.raises(InputError, match="no public family"):
        model.save_pretrained(tmp_path / "out", format="hub")
    with pytest.raises(InputError, match="unknown format 'hug'"):
        model.save_pretrained(tmp_path / "out", format="hug")
    assert not (tmp_path / "out").exists()


def test_an_id_outside_the_vocabulary(copy: Path):
    with pytest.raises(InputError, match="expected ids from 0 to 49"):
        polyformer.from_pretrained(copy)(torch.tensor([[1, 50]]))


def indexed(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "{}", "a/../../other/x", "..", "", "a\\b", "a" * 300, "a\0b"]
)
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


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"x"', "[" * 5000, '{"model_type": []}', '{"a": 1, "a": 2}']
)
def test_a_config_that_is_none(copy: Path, content: str):
    (copy / "config.json").write_text(content)
    fails(copy)


@pytest.mark.parametrize("layers", [51, 4096])
def test_layers_that_no_weights_are_for(copy: Path, tmp_path: Path, layers: int):
    """Refused before the layers are built."""
    assert f"too few for the {layers} layers" in fails(edited(copy, num_hidden_layers=layers))
    create_model("decoder-tiny", num_hidden_layers=1, hidden_size=16).save_pretrained(tmp_path / "own")
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    own["decoder"]["num_hidden_layers"] = layers
    (tmp_path / "own" / "config.json").write_text(json.dumps(own))
    assert f"too few for the {layers} layers" in fails(tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected an integer from 1 to 4096"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected an integer from 1 to 16777216"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected an integer"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0, expected an integer"),
        ({"hidden_size": True}, "hidden_size is True, expected an integer"),
        ({"layer_norm_eps": "1e3"}, "layer_norm_eps is '1e3', expected a number from 0 to 1"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02, expected a number from 0 to 1"),
        ({"hidden_act": ["gelu"]}, r"hidden_act is \['gelu'\], expected a text"),
        ({"architectures": [5]}, r"architectures is \[5\], expected a list, each a text or null"),
        ({"architectures": "BertModel"}, "architectures is 'BertModel', expected a list"),
        ({"type_vocab_size": None}, "type_vocab_size is None, expected an integer from 0"),
        ({"hidden_dropout_prob": 2}, "hidden_dropout_prob is 2, expected a number from 0 up to"),
        ({"id2label": ["a"]}, "id2label is .* expected an object of numbers to names"),
        ({"id2label": {"x": "a"}}, "id2label is .* expected an object of numbers to names"),
        ({"model_type": ["bert"]}, r"model_type \['bert'\] is not supported"),
        ({"pad_token_id": [0]}, r"pad_token_id is \[0\], expected an integer"),
    ],
)
def test_values_that_no_config_has(copy: Path, changes: dict[str, object], message: str):
    assert re.search(message, fails(edited(copy, **changes)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptj", {"n_head": 0}),
        ("gptj", {"n_head": 8192}),
        ("gptj", {"rotary_dim": "64"}),
        ("albert", {"num_hidden_groups": "1"}),
        ("longformer", {"attention_window": {}}),
        ("longformer", {"attention_window": [512, "512"]}),
        ("longformer", {"max_position_embeddings": None}),
        ("xlm", {"n_langs": "3"}),
        ("reformer", {"attn_layers": 3}),
        ("reformer", {"axial_pos_shape": 64}),
        ("reformer", {"num_buckets": ["a"]}),
        ("reformer", {"lsh_attn_chunk_length": 0, "num_buckets": None}),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}),
        ("gpt_neo", {"attention_types": [["global", 1]]}),
    ],
)
def test_values_that_families_compute_with(name: str, changes: dict[str, object]):
    family = FAMILIES[name]
    hub, task = family.hub_config(family.template)
    with pytest.raises(InputError, match=r"config.json: "):
        family.config({**hub, **changes}, task)


@pytest.mark.parametrize(
    ("name", "value"), [("initializer_range", -0.5), ("hidden_size", 2**25), ("vocab_size", 2**62)]
)
def test_values_that_no_config_of_ours_has(copy: Path, tmp_path: Path, name: str, value: float):
    polyformer.from_pretrained(copy).save_pretrained(tmp_path / "own")
    assert f"{name}: expected" in fails(edited(tmp_path / "own", **{name: value}))
