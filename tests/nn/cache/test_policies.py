"""Cache policies equal dense attention with masked keys; padding, beams, drafts, states and errors."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.nn.cache.policies import Dense, decoder
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.state import load_state, save_state
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState
from polyformer.nn import CachePolicy, CompressedCache, DroppingPolicy
from polyformer.nn.cache.call import CacheCall
from polyformer.nn.cache.policies import SnapKV

KINDS = sorted(kind for kind in CachePolicy.kinds if issubclass(CachePolicy.kinds[kind], DroppingPolicy))
EXAMPLES = [
    dataclasses.replace(policy, int8=int8)
    for kind in KINDS
    for policy in CachePolicy.kinds[kind].examples()
    for int8 in (False, True)
    if isinstance(policy, DroppingPolicy)
]
BIASES = [policy for policy in EXAMPLES if policy.supports_score_bias]
CASES = [
    *((policy, position) for policy in EXAMPLES for position in ("rope", "learned")),
    *((policy, "alibi") for policy in BIASES),
    *((policy, "t5") for policy in BIASES if not policy.int8),
]
STEPS = [24, 1, 1, 1, 5, 1]
"""Tokens of each call; the first is the prompt."""


def ids(rows: int = 3, length: int = sum(STEPS)) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def masks(length: int = STEPS[0]) -> Tensor:
    """Return a mask with padding on the left: no tokens, some, and most, so that few are real."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :9], mask[2, :20] = 0, 0
    return mask


@torch.no_grad()
def read(
    model: Transformer, state: ModelState, mask: Tensor | None = None, text: Tensor | None = None
) -> tuple[Tensor, ModelState]:
    """Return the logits of the tokens after the prompt, and the last state."""
    text, at, logits = ids() if text is None else text, 0, []
    for new in STEPS:
        output = model(text[:, at : at + new], attention_mask=None if at else mask, state=state)
        assert output.state is not None
        state, at = output.state, at + new
        logits.append(output.logits)
    return torch.cat(logits[1:], 1), state


def caches(state: ModelState) -> list[CompressedCache]:
    return [x for layer in state.layers if isinstance(x := layer.self_attention, CompressedCache)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("policy", "position"), CASES, ids=str)
def test_a_policy_is_dense_attention_with_masked_keys(policy: DroppingPolicy, position: str, padded: bool):
    model, mask = decoder(position), masks() if padded else None
    logits, state = read(model, model.new_state(cache=policy), mask)
    plain = copy.deepcopy(model)
    assert plain.decoder is not None
    dense = [Dense(policy) for _ in plain.decoder.sequence]
    for layer, mechanism in zip(plain.decoder.sequence, dense):
        layer.attention.mechanism = mechanism
    expected, _ = read(plain, plain.new_state(), mask)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    for cache, mechanism in zip(caches(state), dense):
        assert cache.slots is not None
        assert mechanism.dropped is not None
        kept = torch.zeros_like(mechanism.dropped).scatter_(-1, cache.slots, True)
        real = torch.ones_like(kept)
        if mask is not None:
            real[..., : STEPS[0]] = mask[:, None].bool()
        assert torch.equal(kept & real, ~mechanism.dropped & real)


def test_a_window_that_attends_to_itself_lifts_no_key_beside_it():
    """The last two queries attend to their own keys; of the others they see only key 0."""
    direction = torch.eye(4, dtype=torch.float64)[0]
    keys = torch.tensor([2.0, 0, 0, 0, 8, 8]).double()[:, None] * direction
    queries = direction.expand(1, 1, 6, 4)
    _, _, cache = KeyValueCache().append(keys[None, None], keys[None, None])
    call = CacheCall(queries, queries, cache, Context(6, 6, causal=True), 1.0, lambda x, context: x)
    scores = SnapKV(budget=3, window=2, kernel=3).scores(call, None)[0, 0]
    assert scores[0] > scores[3], "key 3 lies beside the window"


@pytest.mark.parametrize("policy", EXAMPLES, ids=str)
def test_heads_and_layers_keep_different_keys(policy: DroppingPolicy):
    model = decoder()
    first, second = caches(read(model, model.new_state(cache=policy))[1])
    assert first.slots is not None
    assert second.slots is not None
    assert first.dropped >= STEPS[0] - policy.budget_for(STEPS[0])
    assert not torch.equal(first.slots, second.slots)
    assert not torch.equal(first.slots[:, 0], first.slots[:, 1])


@pytest.mark.parametrize(("ratio", "kept"), [(0.5, 12), (0.3, 7), (0.01, 4), (1.0, 24)])
def test_a_ratio_is_the_share_of_the_prompts_keys_that_stay(ratio: float, kept: int):
    """Of 24 tokens; the window of 3 and a key more stay in any case."""
    model = decoder()
    _, state = read(model, model.new_state(cache=f"snapkv(ratio={ratio}, window=3)"))
    for cache in caches(state):
        assert cache.cache.held == kept + sum(STEPS[1:])
        assert cache.dropped == 24 - kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_budget_changes_no_bit(kind: str):
    model = decoder().float()
    usual = read(model, model.new_state(), masks())[0]
    # After every call `h2o` keeps no more keys than the prompt had.
    for all_keys in ("budget=100", *(() if kind == "h2o" else ("ratio=1.0",))):
        assert torch.equal(read(model, model.new_state(cache=f"{kind}({all_keys})"), masks())[0], usual)


@pytest.mark.parametrize("policy", EXAMPLES, ids=str)
def test_rows_of_a_batch_are_independent(policy: DroppingPolicy):
    model, mask = decoder(), masks()
    logits = read(model, model.new_state(cache=policy), mask)[0]
    for row in (0, 1):
        start = int(STEPS[0] - mask[row].sum())
        state, text = model.new_state(cache=policy), ids()[row : row + 1, start:]
        with torch.no_grad():
            state = model(text[:, : STEPS[0] - start], state=state).state
            alone = model(text[:, STEPS[0] - start :][:, :1], state=state).logits
        torch.testing.assert_close(alone[0], logits[row, :1], atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("sides", [(0, 7), (5, 6)], ids=str)
@pytest.mark.parametrize("policy", EXAMPLES, ids=str)
def test_padding_on_the_right_is_no_token(policy: DroppingPolicy, sides: tuple[int, int]):
    """The last tokens of a row are its last words, and padding after them takes no place among these."""
    model, text, (left, right) = decoder(), ids(2), sides
    mask = torch.ones(2, STEPS[0], dtype=torch.long)
    mask[1, :left], mask[1, STEPS[0] - right :] = 0, 0
    both = model(text[:, : STEPS[0]], attention_mask=mask, state=model.new_state(cache=policy)).state
    alone = model(text[1:, left : STEPS[0] - right], state=model.new_state(cache=policy)).state
    for token in text[:, STEPS[0] :].split(1, 1):
        padded, single = model(token, state=both), model(token[1:], state=alone)
        torch.testing.assert_close(padded.logits[1:], single.logits, atol=1e-10, rtol=0)
        both, alone = padded.state, single.state


@pytest.mark.parametrize("policy", EXAMPLES, ids=str)
def test_a_saved_state_goes_on(policy: DroppingPolicy, tmp_path: Any):
    model = decoder()
    state = read(model, model.new_state(cache=policy))[1]
    save_state(state, tmp_path / "state")
    again, token = load_state(tmp_path / "state"), ids()[:, :1]
    with torch.no_grad():
        assert torch.equal(model(token, state=again).logits, model(token, state=state).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_follow_their_own_keys(kind: str):
    model = decoder().float()
    options: dict[str, Any] = {"cache": f"{kind}(budget=70)", "num_beams": 3, "max_new_tokens": 20}
    prompt = ids(2, 100)
    both = model.generate(prompt, **options)
    for row in range(2):
        single = model.generate(prompt[row : row + 1], **options)
        assert torch.equal(single.sequences[0], both.sequences[row])
    dense = model.generate(prompt, num_beams=3, max_new_tokens=20)
    assert not torch.equal(dense.sequences, both.sequences)


def test_drafts_do_not_change_the_text():
    model, options = decoder().float(), {"cache": "snapkv(budget=70)", "max_new_tokens": 30}
    usual = model.generate(ids(1, 100), **options)
    drafted = model.generate(ids(1, 100), draft="lookup", **options)
    assert torch.equal(usual.sequences, drafted.sequences)
    assert drafted.drafted is not None
    assert drafted.drafted.proposed


def test_layers_with_a_window_keep_their_window():
    model = decoder(attention="PerLayer([Window(8), Causal()])")
    state = read(model, model.new_state(cache="h2o(budget=7)"))[1]
    assert not isinstance(state.layers[0].self_attention, CompressedCache)
    assert isinstance(state.layers[1].self_attention, CompressedCache)
    assert state.layers[1].self_attention.cache.held == 7


REFUSED = {
    "shaw": ({"position": "shaw"}, "position scheme"),
    "dynamic": (
        {
            "position": {
                "kind": "rope",
                "extension": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 100},
            }
        },
        "scheme",
    ),
    "linear": ({"attention": "performer"}, "softmax"),
    "sink": ({"attention": "softmax(sink=True)"}, "a soft_cap or a sink"),
    "window": ({"attention": "Window(8)"}, "window"),
    "strided": ({"attention": "Strided(8)"}, "pattern"),
    "memory": ({"memory": "recurrent"}, "memory"),
    "depth": ({"depth": "act"}, "depth"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_such_keys_are_refused(name: str):
    options, words = REFUSED[name]
    model = decoder(**options)
    with pytest.raises(InputError, match=f"^cache: 'snapkv' .*{words}.*leave the cache out$"):
        model.generate(ids(1, 60), cache="snapkv(budget=70)")


def test_expected_attention_is_refused_with_biases():
    with pytest.raises(InputError, match=r"^cache: 'expected' .*position scheme.*'snapkv' or 'h2o'.*out$"):
        decoder("alibi").new_state(cache="expected(budget=8)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "snapkv(budget=32)"}, "budget: expected more keys than the 32 that 'snapkv' always keeps"),
        ({"cache": "snapkv(budget=40, kernel=4)"}, "kernel: expected an odd number, got 4"),
        (
            {"cache": "snapkv(budget=4, ratio=0.5)"},
            "budget and ratio: expected one of them, got budget=4 and ratio=0.5; set budget .*, or ratio to",
        ),
        (
            {"cache": "h2o(budget=7, ratio=0.5)"},
            "budget and ratio: expected one of them, got budget=7 and ratio=0.5",
        ),
        ({"cache": "h2o(ratio=1.5)"}, "cache.ratio: expected a share in (0, 1], got 1.5"),
        (
            {"cache": "expected(budget=4)"},
            "budget: expected more keys than the 4 that 'expected' always keeps",
        ),
        ({"cache": "snap"}, "snapkv"),
        ({"cache": "h2o(ratio=0.5)", "draft": "lookup"}, "draft: the cache policy 'h2o' drops keys"),
        ({"cache": "h2o(budget=7)", "compile": True}, "compile: with a mixture, .* or dropped keys"),
        ({"cache": "h2o(budget=7)", "document_ids": ids(1, 100) * 0}, "document_ids"),
    ],
)
def test_bad_options_name_their_fix(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        decoder().generate(ids(1, 100), **options)


def test_the_keys_in_a_state_are_explained():
    model = decoder(attention="PerLayer([Full(), Window(4)])")
    policy = "snapkv(budget=8, window=3, kernel=3)"
    assert str(polyformer.explain(model.new_state(cache=policy))).startswith("layer 1  snapkv: all 0 tokens")
    assert polyformer.explain(model.new_state(cache="int8")).lines["layer 1"] == "0 tokens in int8"
    _, state = read(model, model.new_state(cache=policy))
    [cache] = caches(state)
    assert cache.slots is not None
    first, second = (set(head) for head in cache.slots[0].tolist())
    tokens, kept = sum(STEPS), 8 + sum(STEPS[1:])
    lines = polyformer.explain(state).lines
    assert lines["layer 1"] == (
        f"snapkv: each head keeps {kept} of {tokens} tokens, {len(first & second)} of them in all 2 heads; "
        f"{tokens - len(first | second)} are in none"
    )
    assert lines["layer 2"].endswith(" tokens")


def test_a_policy_without_a_number_keeps_1024_keys():
    assert CachePolicy.from_dict("snapkv", "cache").budget == 1024  # type: ignore[attr-defined]
    assert CachePolicy.from_dict("snapkv(ratio=0.5)", "cache").budget is None  # type: ignore[attr-defined]
