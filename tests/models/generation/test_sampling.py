"""Sampling: the right distribution, its own randomness."""

import math

import pytest
import torch
from tiny_models import decoder, next_log_probabilities, pair, prompts

from polyformer import GenerationConfig, InputError
from polyformer.models.generation import SamplingConfig

DRAWS = 4000


def first_tokens(seed: int = 0, **options: float) -> torch.Tensor:
    """The first new token of many samples of one prompt."""
    config = GenerationConfig(
        max_new_tokens=1,
        num_return_sequences=DRAWS,
        sampling=SamplingConfig(do_sample=True, seed=seed, **options),
    )
    return decoder(1).generate(prompts(1, 4), config=config).sequences[:, -1]


def distribution() -> torch.Tensor:
    """The model's own log-probabilities for that token."""
    return next_log_probabilities(decoder(1), prompts(1, 4)[0], [])


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """The statistic over tokens expected five times or more, and what it exceeds once in 10000 times."""
    expected = probabilities * len(tokens)
    seen = torch.bincount(tokens, minlength=len(probabilities)).to(expected)
    enough = expected >= 5
    freedom = int(enough.sum()) - 1
    statistic = float(((seen - expected)[enough] ** 2 / expected[enough]).sum())
    cube = 1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))  # Wilson and Hilferty 1931
    return statistic, freedom * cube**3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_distribution_at_the_temperature(temperature):
    tokens = first_tokens(temperature=temperature)
    statistic, limit = chi_square(tokens, (distribution() / temperature).softmax(-1))
    assert statistic < limit
    wrong, _ = chi_square(tokens, (distribution() / (1.3 * temperature)).softmax(-1))
    assert wrong > 3 * limit, "the test should tell one temperature from another"


def test_top_k_draws_from_the_likeliest_and_in_their_proportion():
    tokens = first_tokens(top_k=4, temperature=2.0)
    best = distribution().topk(4).indices
    assert set(tokens.tolist()) == set(best.tolist())
    allowed = torch.full_like(distribution(), -torch.inf).index_copy(0, best, distribution()[best] / 2.0)
    statistic, limit = chi_square(tokens, allowed.softmax(-1))
    assert statistic < limit


def test_top_p_draws_from_the_fewest_that_reach_the_mass():
    probabilities = (distribution() / 2.0).softmax(-1).sort(descending=True)
    needed = int((probabilities.values.cumsum(0) < 0.8).sum()) + 1
    assert 1 < needed < 12
    tokens = first_tokens(top_p=0.8, temperature=2.0)
    assert set(tokens.tolist()) == set(probabilities.indices[:needed].tolist())


def test_scores_are_the_models_own_whatever_shapes_the_choice():
    config = GenerationConfig(
        max_new_tokens=3,
        min_new_tokens=3,
        repetition_penalty=2.0,
        num_return_sequences=2,
        sampling=SamplingConfig(do_sample=True, temperature=3.0, seed=0),
    )
    model, prompt = decoder(1), prompts(1, 4)
    got = model.generate(prompt, config=config)
    for row, score in zip(got.new_tokens(), got.scores):
        steps = [next_log_probabilities(model, prompt[0], row[:i])[row[i]] for i in range(3)]
        torch.testing.assert_close(score, torch.stack(steps).sum(), rtol=1e-10, atol=1e-10)


def test_a_seed_repeats():
    assert torch.equal(first_tokens(seed=7), first_tokens(seed=7))
    assert not torch.equal(first_tokens(seed=7), first_tokens(seed=8))


def test_without_a_seed_torchs_own_decides():
    model, settings = decoder(1), {"max_new_tokens": 4, "num_return_sequences": 9, "do_sample": True}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = model.generate(prompts(1, 4), **settings).sequences
        second = model.generate(prompts(1, 4), **settings).sequences
        torch.manual_seed(0)
        again = model.generate(prompts(1, 4), **settings).sequences
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_generator_takes_the_place_of_a_seed():
    model, settings = decoder(1), {"max_new_tokens": 4, "num_return_sequences": 9, "do_sample": True}
    before = torch.random.get_rng_state()
    own = torch.Generator().manual_seed(3)
    first, second = (model.generate(prompts(1, 4), generator=own, **settings).sequences for _ in range(2))
    assert torch.equal(model.generate(prompts(1, 4), seed=3, **settings).sequences, first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(InputError, match="generator and seed: sampling uses only one"):
        model.generate(prompts(1, 4), generator=own, seed=1, **settings)
    with pytest.raises(InputError, match="generator: only sampling uses it; set do_sample"):
        model.generate(prompts(1, 4), generator=own, max_new_tokens=2)


def test_sampling_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    first_tokens(seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_samples_of_one_input_stand_together():
    config = GenerationConfig(
        max_new_tokens=2, num_return_sequences=3, sampling=SamplingConfig(do_sample=True, seed=0)
    )
    ids = prompts(2, 4)
    got = decoder(0).generate(ids, config=config)
    assert torch.equal(got.sequences[:, :4], ids.repeat_interleave(3, 0))
    assert pair(3).generate(ids, config=config).sequences.shape[0] == 6
