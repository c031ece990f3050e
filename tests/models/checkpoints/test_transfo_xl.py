"""Transformer-XL's checkpoints beside what transformers 4.35 computed (recorded/record_transfo_xl.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import polyformer
from polyformer.attention.patterns import Window
from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import NO_TOKENS
from polyformer.models.architectures import Transformer, zero_memory
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.outputs import ModelState
from polyformer.nn.memory.recurrent import Hidden
from polyformer.nn.stack import LayerState

FILE = Path(__file__).parent / "recorded" / "transfo_xl.safetensors"
RECORDED = load_file(FILE)
with safe_open(FILE, "pt") as opened:
    CONFIGS: dict[str, dict[str, Any]] = json.loads(opened.metadata()["configs"])
CASES = [name for name in CONFIGS if name != "classes"]
SEGMENTS, MEMORY = range(3), 5


def recorded(name: str, under: str) -> dict[str, Tensor]:
    start = f"{name}/{under}."
    return {key.removeprefix(start): x for key, x in RECORDED.items() if key.startswith(start)}


def folder(path: Path, name: str, **options: object) -> Path:
    """The checkpoint of a case as a directory."""
    (path / "config.json").write_text(json.dumps(CONFIGS[name] | options))
    save_file(recorded(name, "weights"), path / "model.safetensors")
    return path


def loaded(path: Path, name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return polyformer.from_pretrained(folder(path, name), dtype=dtype)


def beginning(model: Transformer, kind: str) -> ModelState:
    """Before the first token: keys and values, hidden states, or (transformers' beginning) zeros."""
    assert model.decoder is not None
    if kind == "keys":
        return model.new_state()
    layers = len(model.decoder.sequence)
    if kind == "hidden":
        return ModelState(NO_TOKENS, (LayerState(memory=Hidden()),) * layers)
    return zero_memory(model, rows=2)


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_segments_are_theirs(name: str, tmp_path: Path):
    """Log-probabilities, loss and memory, over three segments."""
    model, ids = loaded(tmp_path, name), recorded(name, "ids")
    for kind in ("keys", "hidden", "zeros"):
        expected = recorded(name, "zeros" if kind == "zeros" else "empty")
        state = beginning(model, kind)
        for segment in SEGMENTS:
            text = ids[str(segment)]
            output = model(text, labels=text, state=state, use_cache=True)
            same(output.logits, expected[f"logits.{segment}"])
            same(output.loss, expected[f"loss.{segment}"])
            state = output.state
        if kind != "keys":
            for layer, own in enumerate(state.layers):
                same(own.memory.vectors, expected[f"memory.{layer}"])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_float32_and_generation_are_theirs(name: str, tmp_path: Path):
    path, ids = folder(tmp_path, name, eos_token_id=None), recorded(name, "ids")
    model = polyformer.from_pretrained(path)
    expected, state = recorded(name, "empty"), model.new_state()
    for segment in SEGMENTS:
        output = model(ids[str(segment)], state=state, use_cache=True)
        same(output.logits.double(), expected[f"logits.{segment}"], 1e-5)
        state = output.state
    greedy = RECORDED[f"{name}/greedy"]
    new = greedy.shape[1] - ids["0"].shape[1]
    ours = model.double().generate(ids["0"], max_new_tokens=new).sequences
    assert torch.equal(ours, greedy)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_it_is_saved_back_bitwise(name: str, tmp_path: Path):
    """What is tied stands in our file once, as in those of transformers."""
    (tmp_path / "theirs").mkdir()
    model = loaded(tmp_path / "theirs", name, torch.float32)
    model.save_pretrained(tmp_path / "ours", format="hub")
    theirs, ours = recorded(name, "weights"), load_file(tmp_path / "ours" / "model.safetensors")
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    for key in theirs.keys() - ours.keys():
        assert any(torch.equal(theirs[key], tensor) for tensor in ours.values()), key
        assert key.startswith("crit.out_") or "dec_attn.r_" in key
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    for option, value in config.items():
        if option in CONFIGS[name] and option not in ("dtype", "label2id", "problem_type"):
            assert value == CONFIGS[name][option], option
    assert polyformer.from_pretrained(tmp_path / "ours").config == model.config


def test_a_classifier_is_theirs(tmp_path: Path):
    model = loaded(tmp_path, "classes")
    same(model(RECORDED["classes/ids.0"]).logits, RECORDED["classes/logits"])


def test_it_trains(tmp_path: Path):
    """With dropout and memory: every weight gets a gradient, through the memory too."""
    model, ids = loaded(tmp_path, "div_val_2").train(), recorded("div_val_2", "ids")
    state = model.new_state()
    for segment in SEGMENTS:
        output = model(ids[str(segment)], labels=ids[str(segment)], state=state, use_cache=True)
        output.loss.backward()
        state = output.state
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


def test_options_become_ours(tmp_path: Path):
    family = FAMILIES["transfo-xl"]
    config = family.config(CONFIGS["pre_lnorm"], "LMHeadModel")
    stack = config.decoder
    assert stack is not None
    assert stack.attention.mechanism.pattern == Window(MEMORY - 1, 0)
    assert (stack.position.clamp_distance, stack.block.kind, stack.final_norm) == (3, "pre", False)
    ties = family.config(CONFIGS["div_val_4"], "LMHeadModel").head.tie_projs
    assert ties == (False, False, False)
    without = {key: value for key, value in CONFIGS["div_val_4"].items() if key != "tie_projs"}
    assert family.config(without, "LMHeadModel").head.tie_projs is None
    without["proj_share_all_but_first"] = False
    assert family.config(without, "LMHeadModel").head.tie_projs == ties


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_type": 1}, "attn_type is 1, and only 0 is supported"),
        ({"sample_softmax": 10}, "sample_softmax is above 0"),
        ({"d_model": 7}, "d_model is 7, expected an even number"),
        ({"same_length": True, "mem_len": 1}, "same_length with mem_len 1: a token would see at most"),
        ({"mem_len": -1}, "mem_len is -1, expected an integer from 0"),
        ({"cutoffs": [14, 6]}, r"cutoffs: expected increasing numbers from 1, got \[14, 6\]"),
        ({"cutoffs": 3}, "cutoffs is 3, expected a list"),
        ({"tie_projs": [1, 0, 0]}, "tie_projs is"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options: dict[str, object], words: str, tmp_path: Path):
    with pytest.raises(InputError, match=words):
        polyformer.from_pretrained(folder(tmp_path, "div_val_2", **options))


@torch.no_grad()
def test_a_memory_of_zeros_is_a_recurrent_ones(tmp_path: Path):
    model = loaded(tmp_path, CASES[0], torch.float32).eval()
    ids = recorded(CASES[0], "ids")["0"]
    assert zero_memory(model, 3).layers[0].memory.vectors.shape == (3, MEMORY, model.config.hidden_size)
    memory = model.decoder.memory
    memory.length = 0
    expected = model(ids).logits
    same(model(ids, state=zero_memory(model, len(ids)), use_cache=True).logits, expected, 1e-5)
    with pytest.raises(InputError, match="zero_memory: expected a model with the memory 'recurrent'"):
        zero_memory(polyformer.create_model("decoder-tiny", vocab_size=9), 1)
