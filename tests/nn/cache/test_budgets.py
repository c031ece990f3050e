"""Budgets by layer and by head equal dense attention with masked keys, and have the total of the policy."""

import copy
from typing import Any

import pytest
import torch
from tests.nn.cache.policies import Competing, Dense, decoder
from tests.nn.cache.test_policies import STEPS, caches, ids, masks, read

from polyformer.core.errors import InputError
from polyformer.core.state import load_state, save_state
from polyformer.nn import Ada, CachePolicy, CompressedCache, DroppingPolicy, HeadsCache, Pyramid
from polyformer.nn.cache.budgets import first_of_each, shared_out

SNAPKV = "snapkv(budget=8, window=3, kernel=3)"
EXPECTED = "expected(budget=8, future=5, sinks=2)"
BY_HEAD = [
    f"ada(of={SNAPKV})",
    f"ada(of={SNAPKV}, alpha=0.0)",
    f"ada(of={EXPECTED}, alpha=0.45)",
    "ada(of=snapkv(ratio=0.4, window=2, kernel=3, int8=true))",
]
BY_LAYER = {
    f"pyramid(of={SNAPKV}, slope=0.8)": (11, 5),
    "pyramid(of=h2o(budget=7), slope=0.5)": (9, 5),
    "pyramid(of=expected(ratio=0.5, sinks=2), slope=0.5)": (18, 6),
    f"pyramid(of=ada(of={SNAPKV}), slope=0.8)": (11, 5),
}
"""The mean number of keys that a head of both layers keeps of the prompt of 24 tokens."""
CASES = [
    *((policy, "rope") for policy in [*BY_HEAD, *BY_LAYER]),
    *((f"ada(of={SNAPKV})", position) for position in ("learned", "alibi", "t5")),
]


def dense(policy: CachePolicy) -> Dense:
    if isinstance(policy, Ada):
        return Competing(policy.basis, policy.alpha)
    assert isinstance(policy, DroppingPolicy)
    return Dense(policy)


def parsed(text: str) -> CachePolicy:
    return CachePolicy.from_dict(text, "cache")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("text", "position"), CASES, ids=str)
def test_it_is_dense_attention_with_masked_keys(text: str, position: str, padded: bool):
    model, mask = decoder(position), masks() if padded else None
    logits, state = read(model, model.new_state(cache=text), mask)
    plain = copy.deepcopy(model)
    assert plain.decoder is not None
    layers = [dense(policy) for policy in parsed(text).for_layers(2)]
    for layer, mechanism in zip(plain.decoder.sequence, layers):
        layer.attention.mechanism = mechanism
    expected, _ = read(plain, plain.new_state(), mask)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    for cache, mechanism in zip(caches(state), layers):
        assert cache.slots is not None
        assert mechanism.dropped is not None
        kept = torch.zeros_like(mechanism.dropped).scatter_(-1, cache.slots, True)
        real = torch.ones_like(kept)
        if mask is not None:
            real[..., : STEPS[0]] = mask[:, None].bool()
        assert torch.equal(kept & real, ~mechanism.dropped & real)


@pytest.mark.parametrize(("text", "budgets"), BY_LAYER.items(), ids=str)
def test_budgets_fall_from_the_first_layer_to_the_last(text: str, budgets: tuple[int, int]):
    model = decoder()
    state = model(ids()[:, : STEPS[0]], state=model.new_state(cache=text)).state
    for cache, budget in zip(caches(state), budgets):
        counts = cache.counts if isinstance(cache, HeadsCache) else torch.full((3, 2), cache.cache.held)
        assert counts is not None
        assert (counts.sum(1) == 2 * budget).all()


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("slope", [0.0, 0.3, 0.95])
def test_the_total_of_all_layers_stays(layers: int, slope: float):
    policies = parsed(f"pyramid(of=snapkv(budget=1000), slope={slope})").for_layers(layers)
    budgets = [policy.basis.keys for policy in policies if isinstance(policy.basis, DroppingPolicy)]
    assert sum(budgets) == 1000 * layers
    assert budgets == sorted(budgets, reverse=True)
    if layers > 1:
        assert budgets[0] == 1000 + int(967 * slope)  # the window of 32 and a key more stay in every layer


def test_layers_with_a_window_are_no_part_of_the_pyramid():
    model = decoder(attention="PerLayer([Causal(), Window(8), Causal()])", num_hidden_layers=3)
    _, state = read(model, model.new_state(cache=f"pyramid(of={SNAPKV}, slope=0.8)"))
    assert [cache.cache.held - sum(STEPS[1:]) for cache in caches(state)] == [11, 5]


def test_heads_share_the_budget_of_a_layer_by_their_scores():
    """Head 0 has 5 of the 6 best keys, head 1 one; each has an own third of the budget of 3."""
    scores = torch.tensor([[[9.0, 8, 7, 6, 5, 0], [1, 2, 3, 4, 5.5, 1]]])
    third, none, all_own = (shared_out(scores, torch.tensor([3]), alpha) for alpha in (1 / 3, 0.0, 1.0))
    assert none.tolist() == [[5, 1]]
    assert third.tolist() == [[4, 2]]  # 2/3 * 5 + 1 = 4.33 and 2/3 * 1 + 1 = 1.67
    assert all_own.tolist() == [[3, 3]]
    assert first_of_each(scores, third).tolist() == [[[0, 1, 2, 3], [3, 3, 3, 4]]]


def test_copies_of_a_key_are_hidden():
    model = decoder()
    _, state = read(model, model.new_state(cache=f"ada(of={SNAPKV}, alpha=0.0)"))
    for cache in caches(state):
        assert isinstance(cache, HeadsCache)
        assert cache.kept is not None
        assert cache.counts is not None
        assert (cache.counts[:, 0] != cache.counts[:, 1]).any()
        assert cache.kept.shape[-1] == int(cache.counts.max())
        assert str(cache).startswith(f"ada: heads keep {int(cache.counts[0].min()) + 9} to ")


@pytest.mark.parametrize("text", [BY_HEAD[0], *BY_LAYER])
def test_a_saved_state_goes_on(text: str, tmp_path: Any):
    model = decoder()
    state = read(model, model.new_state(cache=text))[1]
    save_state(state, tmp_path / "state")
    again, token = load_state(tmp_path / "state"), ids()[:, :1]
    with torch.no_grad():
        assert torch.equal(model(token, state=again).logits, model(token, state=state).logits)


@pytest.mark.parametrize("text", BY_HEAD)
def test_rows_of_a_batch_are_independent(text: str):
    model, mask = decoder(), masks()
    logits = read(model, model.new_state(cache=text), mask)[0]
    for row in range(3):
        start = int(STEPS[0] - mask[row].sum())
        state, tokens = model.new_state(cache=text), ids()[row : row + 1, start:]
        with torch.no_grad():
            state = model(tokens[:, : STEPS[0] - start], state=state).state
            alone = model(tokens[:, STEPS[0] - start :][:, :1], state=state).logits
        torch.testing.assert_close(alone[0], logits[row, :1], atol=1e-10, rtol=0)


def test_beams_and_drafts_follow_their_own_keys():
    model, options = decoder().float(), {"cache": f"ada(of={SNAPKV})", "max_new_tokens": 20}
    prompt = ids(2, 100)
    both = model.generate(prompt, num_beams=3, **options)
    for row in range(2):
        single = model.generate(prompt[row : row + 1], num_beams=3, **options)
        assert torch.equal(single.sequences[0], both.sequences[row])
    usual = model.generate(prompt[:1], **options)
    drafted = model.generate(prompt[:1], draft="lookup", **options)
    assert torch.equal(usual.sequences, drafted.sequences)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ada(of=h2o(budget=7))", "of: expected a policy that drops keys after the prompt, .*got 'h2o'"),
        ("ada(of=int8)", "of: expected a policy that drops keys after the prompt, .*got 'int8'"),
        ("ada", "'of' is missing"),
        ("pyramid(of=int8)", "of: expected a policy that drops keys, .*got 'int8'"),
        (f"pyramid(of=pyramid(of={SNAPKV}))", "of: expected a policy that drops keys, .*got 'pyramid'"),
        ("pyramid(of=snapkv(ratio=0.6), slope=0.9)", "slope: expected at most 0.667 with ratio=0.6"),
        (f"pyramid(of={SNAPKV}, slope=1.0)", r"slope: expected a slope in \[0, 1\), got 1.0"),
    ],
)
def test_bad_options_name_their_fix(text: str, message: str):
    with pytest.raises(InputError, match=message):
        parsed(text)


def test_a_policy_with_its_own_keys_per_head_is_one_cache():
    states = decoder().new_state(cache=f"pyramid(of=ada(of={SNAPKV}))").layers
    assert all(isinstance(layer.self_attention, CompressedCache) for layer in states)
    assert isinstance(parsed(f"pyramid(of={SNAPKV})"), Pyramid)
