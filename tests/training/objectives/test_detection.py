"""Replaced-token detection: what is drawn, and what the discriminator is to find, worked by hand."""

import pytest
import torch

from polyformer.training.objectives import draw, replaced


def test_worked_by_hand():
    """Two rows, 9 is the mask: of the hidden 5, 6 and 7 the generator guesses 6 right."""
    ids = torch.tensor([[1, 9, 3, 9], [9, 2, 0, 0]])
    labels = torch.tensor([[-100, 5, -100, 6], [7, -100, -100, -100]])
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    read, targets = replaced(ids, labels, torch.tensor([4, 6, 8]), real)
    assert read.tolist() == [[1, 4, 3, 6], [8, 2, 0, 0]]
    assert targets.tolist() == [[0, 1, 0, 0], [1, 0, -100, -100]]


def test_a_token_that_masking_left_or_changed_is_judged_by_the_text():
    """The second token was left as it is, the third became a random 8: what is drawn takes their places."""
    ids, labels = torch.tensor([[1, 5, 8]]), torch.tensor([[-100, 5, 6]])
    read, targets = replaced(ids, labels, torch.tensor([4, 6]))
    assert read.tolist() == [[1, 4, 6]]
    assert targets.tolist() == [[0, 1, 0]]


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax():
    """40,000 draws: each share within four standard errors, and rows drawn independently."""
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 40_000
    drawn = draw(shares.log().expand(count, 4) + 2.5, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(drawn, minlength=4) / count
    assert ((frequencies - shares).abs() < 4 * (shares * (1 - shares) / count).sqrt()).all()
    same = (drawn[1:] == drawn[:-1]).float().mean().item()
    assert same == pytest.approx(shares.square().sum().item(), abs=0.01)


def test_drawing_repeats_from_its_generator_and_stops_gradients():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    first, again, other = (draw(logits, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not first.requires_grad
    sure = torch.full((20, 5), -1e4)
    sure[:, 2] = 1e4
    assert (draw(sure) == 2).all()
