"""A prompt's state in a file: generation goes on bit for bit, and files of other models are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.cache.policies import decoder
from tests.nn.cache.test_policies import ids

import polyformer
from polyformer.core.errors import InputError
from polyformer.core.files import read_tensors, write_tensors
from polyformer.models.generation import GenerationConfig
from polyformer.models.generation.kept_text import KeptText
from polyformer.models.generation.saved_text import load_state, save_state
from polyformer.nn import CachePolicy

POLICIES = [
    None,
    "int8",
    "int4(group=4, window=6)",
    "snapkv(budget=8, window=3, kernel=3)",
    "h2o(ratio=0.5, int8=true)",
    "pyramid(of=ada(of=snapkv(budget=8, window=3, kernel=3)))",
]
MODELS: dict[str, dict[str, Any]] = {"rope": {}, "window": {"attention": "PerLayer([Window(8), Causal()])"}}
TEXT = ids(1, 40)[0].tolist()


def read(policy: str | None, **options: Any) -> KeptText:
    """Return a text of 30 tokens, read by a small decoder."""
    text = KeptText(decoder(**options).float())
    text.read(TEXT[:30], None if policy is None else CachePolicy.from_dict(policy, "cache"))
    return text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_loaded_text_goes_on_bit_for_bit(policy: str | None, name: str, tmp_path: Path):
    text = read(policy, **MODELS[name])
    save_state(text, tmp_path / "state")
    again = load_state(tmp_path / "state", text.model)
    assert (again.ids, again.policy, again.read_tokens) == (text.ids, text.policy, 0)
    config = GenerationConfig(max_new_tokens=12, cache=text.policy)
    expected, own = text.generate(TEXT, config), again.generate(TEXT, config)
    assert torch.equal(own.sequences, expected.sequences)
    assert torch.equal(own.scores, expected.scores)
    assert again.read_tokens == 10 + 11, "only what follows the state is read"
    if policy is None:
        whole = decoder(**MODELS[name]).float().generate(torch.tensor([TEXT]), max_new_tokens=12)
        assert torch.equal(own.sequences, whole.sequences)


def test_the_package_has_both_by_name(tmp_path: Path):
    text = read(None)
    polyformer.save_state(text, tmp_path / "state")
    assert polyformer.load_state(tmp_path / "state", text.model).ids == TEXT[:30]


def test_a_file_of_another_model_is_refused(tmp_path: Path):
    text = read(None)
    save_state(text, tmp_path / "state")
    with torch.no_grad():
        next(text.model.parameters())[0, 0] += 1  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="the state is of another model, with other weights; load the model"):
        load_state(tmp_path / "state", text.model)


def test_what_cannot_be_saved_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="text: expected a text that was read, got none"):
        save_state(KeptText(decoder()), tmp_path / "state")
    text = read(None, attention="retention")
    with pytest.raises(InputError, match="text: expected KV caches, which can be saved, but layer 0 has"):
        save_state(text, tmp_path / "state")


def damaged(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state with one change."""
    structure = json.loads(bytes(tensors["structure"].tolist()))
    layers = structure["fields"]["model"]["fields"]["layers"]["tuple"]
    cache = layers[0]["fields"]["self_attention"]["fields"]
    name = next(name for name in tensors if name.endswith("layers.0.self_attention.cache.keys"))
    match how:
        case "a shorter text":
            tensors["state.ids"] = tensors["state.ids"][:, :-1].clone()
        case "an id outside the vocabulary":
            tensors["state.ids"] = tensors["state.ids"] + 1000
        case "keys of another width":
            tensors[name] = tensors[name][..., :-1].clone()
        case "keys of another number":
            tensors[name] = tensors[name][:, :, :-1].clone()
        case "keys that are infinite":
            tensors[name] = tensors[name] / 0
        case "keys of another type":
            tensors[name] = tensors[name].double()
        case "a length beyond the keys":
            cache["cache"]["fields"]["length"]["value"] = 10**6
        case "kept keys beyond the text":
            kept = name.removesuffix("cache.keys") + "kept"
            tensors[kept] = tensors[kept] + 100
        case "another policy":
            structure["fields"]["cache"]["value"] = {"kind": "h2o", "budget": 8}
        case "no policy":
            structure["fields"]["cache"]["value"] = None
        case "no budget":
            cache["policy"]["value"] |= {"budget": None, "ratio": 0.5}
        case "a layer less":
            layers.pop()
        case "another class":
            structure["fields"]["model"] = cache["cache"]
        case _:
            cache["seen"]["value"] = -5
    text = torch.tensor(list(json.dumps(structure).encode()), dtype=torch.uint8)
    return {**tensors, "structure": text}


DAMAGES = [
    *("a shorter text", "an id outside the vocabulary", "keys of another width", "keys of another number"),
    *(
        "keys that are infinite",
        "keys of another type",
        "a length beyond the keys",
        "kept keys beyond the text",
    ),
    *("another policy", "no policy", "a layer less", "another class", "negative numbers", "no budget"),
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_an_input_error(how: str, tmp_path: Path):
    text = read("snapkv(budget=8, window=3, kernel=3)")
    save_state(text, tmp_path / "state")
    tensors = damaged(read_tensors(tmp_path / "state"), how)
    write_tensors(tmp_path / "changed", tensors)
    with pytest.raises(InputError):
        load_state(tmp_path / "changed", text.model)


def test_a_state_alone_and_a_pickle_are_refused(tmp_path: Path):
    from polyformer.core import state

    text = read(None)
    assert text.state is not None
    state.save_state(dataclasses.replace(text.state.model), tmp_path / "state")
    with pytest.raises(InputError, match="expected the state of a text, got a ModelState"):
        load_state(tmp_path / "state", text.model)
    torch.save({"x": torch.ones(2)}, tmp_path / "pickle")
    with pytest.raises(InputError, match="is a pickle, whose reading can run code"):
        load_state(tmp_path / "pickle", text.model)
