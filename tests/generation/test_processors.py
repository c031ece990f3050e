"""What is done to logits, by hand-worked examples."""

import torch

from polyformer.generation import SamplingConfig
from polyformer.generation.processors import (
    no_end_before,
    process,
    repetition_penalty,
    sampling_processors,
    temperature,
    top_k,
    top_p,
)

INF = torch.inf
NOTHING = torch.zeros(2, 0, dtype=torch.long)


def test_the_repetition_penalty_moves_the_tokens_of_the_text_alone():
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0]])
    history = torch.tensor([[0, 1, 0], [3, 3, 3]])
    expected = torch.tensor([[1.0, -2.0, 0.5, 3.0], [2.0, -1.0, 0.5, 1.5]])
    assert torch.equal(repetition_penalty(2.0)(logits, history), expected)
    assert torch.equal(repetition_penalty(2.0)(logits, NOTHING), logits)


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


def test_no_end_before_a_length():
    logits = torch.zeros(2, 3)
    held = no_end_before(4, eos=2)(logits, torch.zeros(2, 3, dtype=torch.long))
    assert torch.equal(held, torch.tensor([[0.0, 0.0, -INF]] * 2))
    assert torch.equal(no_end_before(3, eos=2)(logits, torch.zeros(2, 3, dtype=torch.long)), logits)


def test_sampling_applies_temperature_before_top_p():
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    sharp = sampling_processors(SamplingConfig(do_sample=True, temperature=0.25, top_k=3, top_p=0.9))
    assert (process(sharp, logits, NOTHING) > -INF).tolist() == [[False, True, False, False]]
    assert sampling_processors(SamplingConfig(do_sample=True)) == []


def test_the_logits_given_are_left_as_they_were():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    history = torch.tensor([[1], [2]])
    for one in (repetition_penalty(1.5), temperature(2.0), top_k(2), top_p(0.5), no_end_before(4, 2)):
        one(logits, history)
    assert torch.equal(logits, before)
