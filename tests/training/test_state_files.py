"""A state in a file: taken up again bit for bit, whatever it is made of; what is none is refused."""

import json
from pathlib import Path

import pytest
import torch

from polyformer import create_model
from polyformer.attention.mechanisms import LSHConfig, PerformerConfig, RoutingConfig
from polyformer.core.errors import InputError
from polyformer.core.files import write_tensors
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import load_state, save_state, state_tensors
from polyformer.nn.memory import RecurrentConfig

MODELS = {
    "cache": {},
    "memory": {"memory": RecurrentConfig(length=4), "position": "rope"},
    "lsh": {"attention": LSHConfig(buckets=4, window=4), "position": "rope"},
    "performer": {"attention": PerformerConfig(features=4), "position": "rope"},
    "routing": {"attention": RoutingConfig(clusters=2, window=4, local_window=4), "position": "rope"},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_state_goes_on_bit_for_bit(name: str, training: bool, tmp_path: Path):
    model = create_model("decoder-tiny", vocab_size=11, dropout=0.0, **MODELS[name]).train(training)
    ids = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0] * 6 + [1] * 14).expand(2, -1)
    with torch.no_grad():
        state = model(ids[:, :9], document_ids=numbers[:, :9], use_cache=True).state
        save_state(state, tmp_path / "state.safetensors")
        restored = load_state(tmp_path / "state.safetensors")
        assert type(restored) is type(state)
        for _ in range(2):  # the file's tensors are the state's own
            expected = model(ids[:, 9:], document_ids=numbers[:, 9:], state=state)
            output = model(ids[:, 9:], document_ids=numbers[:, 9:], state=restored)
            assert torch.equal(output.last_hidden_state, expected.last_hidden_state)


def test_only_what_is_filled_is_written():
    cache = KeyValueCache(reserve=500)
    with torch.no_grad():
        for _ in range(7):
            cache = cache.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 3))[2].last(4)
    tensors = state_tensors(cache)
    assert tensors["state.keys"].shape == (1, 1, 4, 2)
    assert tensors["state.values"].shape == (1, 1, 4, 3)


def test_a_file_without_a_state_is_refused(tmp_path: Path):
    file = tmp_path / "state.safetensors"
    write_tensors(file, {"x": torch.ones(2)})
    with pytest.raises(InputError, match="not a saved state"):
        load_state(file)
    tensors = state_tensors(KeyValueCache())
    structure = json.loads(bytes(tensors["structure"].tolist()))
    for change, message in (
        ({"state": "os.system"}, "'os.system', which is not imported"),
        ({"fields": {"keys": {"tensor": "elsewhere"}}}, "damaged"),
        ({"fields": {"keyss": {"value": 1}}}, "damaged"),
    ):
        text = json.dumps({**structure, **change}).encode()
        write_tensors(file, {"structure": torch.tensor(list(text), dtype=torch.uint8)})
        with pytest.raises(InputError, match=message):
            load_state(file)
