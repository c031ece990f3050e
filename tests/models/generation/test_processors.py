"""What is done to logits, by hand-worked examples."""

import torch

from polyformer.models.generation import SamplingConfig
from polyformer.models.generation.processors import (
    forbidden,
    forced,
    min_p,
    no_bad_words,
    no_repeat,
    process,
    repetition_penalty,
    sampling_processors,
    temperature,
    top_k,
    top_p,
    typical_p,
)

INF = torch.inf
NOTHING = torch.zeros(2, 0, dtype=torch.long)
CPU = torch.device("cpu")


def test_the_repetition_penalty_moves_the_tokens_of_the_text_alone():
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0]])
    history = torch.tensor([[0, 1, 0], [3, 3, 3]])
    expected = torch.tensor([[1.0, -2.0, 0.5, 3.0], [2.0, -1.0, 0.5, 1.5]])
    assert torch.equal(repetition_penalty(2.0)(logits, history), expected)
    padded = torch.tensor([[-1, -1, 0, 1], [-1, -1, -1, 3]])
    assert torch.equal(repetition_penalty(2.0)(logits, padded), expected), "padding is no token"


def test_temperature_divides():
    assert torch.equal(temperature(0.5)(torch.tensor([[1.0, -2.0]]), NOTHING), torch.tensor([[2.0, -4.0]]))


def test_top_k_keeps_the_likeliest():
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [9.0, 1.0, 1.0, 0.0]])
    expected = torch.tensor([[-INF, 4.0, 3.0, -INF], [9.0, 1.0, 1.0, -INF]])
    assert torch.equal(top_k(2)(logits, NOTHING), expected), "a tie for the last place is kept"
    assert torch.equal(top_k(9)(logits, NOTHING), logits), "more than there are is all"


def test_top_p_keeps_the_fewest_that_reach_the_mass():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    kept = {mass: (top_p(mass)(logits, NOTHING) > -INF).tolist()[0] for mass in (0.01, 0.4, 0.6, 0.8, 0.95)}
    assert kept == {
        0.01: [False, True, False, False],
        0.4: [False, True, False, False],
        0.6: [False, True, False, True],
        0.8: [False, True, True, True],
        0.95: [True, True, True, True],
    }


def test_min_p_is_a_share_of_the_likeliest():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert (min_p(0.4)(logits, NOTHING) > -INF).tolist() == [[False, True, False, True]]
    assert (min_p(0.19)(logits, NOTHING) > -INF).tolist() == [[True, True, True, True]]


def test_typical_sampling_leaves_out_what_is_too_likely():
    logits = torch.tensor([[0.5, 0.11, 0.1, 0.1, 0.1, 0.09]]).log()  # H = 1.5: nearer to 0.11 than to 0.5
    assert (typical_p(0.1)(logits, NOTHING) > -INF).tolist() == [[False, True, False, False, False, False]]
    assert (typical_p(0.9)(logits, NOTHING) > -INF).tolist() == [[True, True, True, True, True, False]]
    some = logits.masked_fill(torch.tensor([False, True, False, False, False, False]), -INF)
    assert not (typical_p(0.9)(some, NOTHING)[0, 1] > -INF)


def test_tokens_are_forbidden_for_a_while():
    logits = torch.zeros(2, 3)
    held = forbidden((0, 2), CPU, 2, 4)
    for length, is_held in ((1, False), (2, True), (3, True), (4, False)):
        expected = torch.tensor([[-INF, 0.0, -INF]] * 2) if is_held else logits
        assert torch.equal(held(logits, torch.zeros(2, length, dtype=torch.long)), expected)
    assert forbidden((1,), CPU)(logits, NOTHING)[0].tolist() == [0.0, -INF, 0.0]


def test_tokens_are_forced_at_one_length():
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    force = forced((1, 2), 4, CPU)
    assert torch.equal(force(logits, torch.zeros(2, 3, dtype=torch.long)), logits)
    expected = torch.tensor([[-INF, 0.0, 0.0]] * 2)
    assert torch.equal(force(logits, torch.zeros(2, 4, dtype=torch.long)), expected)


def test_no_run_of_tokens_occurs_twice():
    logits = torch.zeros(3, 5)
    history = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 1, 2, 1], [-1, -1, -1, -1, 4]])
    allowed = no_repeat(3)(logits, history) > -INF
    assert allowed.tolist() == [[True, True, True, False, True], [True, True, False, True, True], [True] * 5]
    single = no_repeat(1)(logits, history) > -INF
    assert single.tolist() == [
        [True, False, False, False, True],
        [True, False, False, True, True],
        [True, True, True, True, False],
    ]
    assert torch.equal(no_repeat(3)(logits, history[:, -2:]), logits)


def test_bad_words_are_never_completed():
    words = ((4,), (1, 2), (3, 2), (1, 2, 0), (0, 0, 0, 0, 0, 0, 0))
    history = torch.tensor([[0, 1], [1, 2], [0, 0]])
    allowed = no_bad_words(words, CPU)(torch.zeros(3, 5), history) > -INF
    assert allowed.tolist() == [
        [True, True, False, True, False],
        [False, True, True, True, False],
        [True, True, True, True, False],
    ]


def test_sampling_applies_temperature_before_top_p():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    sharp = sampling_processors(SamplingConfig(do_sample=True, temperature=0.25, top_k=3, top_p=0.9))
    assert (process(sharp, logits, NOTHING) > -INF).tolist() == [[False, True, False, False]]
    assert sampling_processors(SamplingConfig(do_sample=True)) == []


def test_the_logits_given_are_left_as_they_were():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    history = torch.tensor([[1], [2]])
    for processor in (
        repetition_penalty(1.5),
        temperature(2.0),
        top_k(2),
        top_p(0.5),
        min_p(0.5),
        typical_p(0.5),
        forbidden((2,), CPU),
        forced((2,), 1, CPU),
        no_repeat(1),
        no_bad_words(((1,),), CPU),
    ):
        processor(logits, history)
    assert torch.equal(logits, before)
