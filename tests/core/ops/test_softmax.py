"""The one softmax: exact, safe where a row sees nothing, and the tap for looking inside."""

import torch

from polyformer.core.ops.softmax import recorded, recording, softmax


def test_is_torch_softmax_where_something_is_seen() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 5, 7, dtype=torch.float64)
    allowed = torch.rand(5, 7) > 0.4
    allowed[:, 0] = True
    probabilities, lse = softmax(scores, allowed)
    masked = scores.masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(probabilities, masked.softmax(-1))
    torch.testing.assert_close(lse, masked.logsumexp(-1))


def test_a_row_of_nothing_is_zero_forward_and_backward() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    probabilities, lse = softmax(scores, torch.tensor([[False] * 3, [True] * 3]))
    assert not probabilities[0].any()
    assert lse[0] == -torch.inf
    (probabilities.square().sum() + lse[1]).backward()
    assert scores.grad is not None
    assert not scores.grad[0].any()
    assert scores.grad[1].all()


def test_a_row_without_keys() -> None:
    probabilities, lse = softmax(torch.zeros(2, 0))
    assert probabilities.shape == (2, 0)
    assert (lse == -torch.inf).all()


def test_gradients_go_through_probabilities_and_log_sum_exp() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, (scores,))


def test_large_scores_do_not_overflow() -> None:
    probabilities, lse = softmax(torch.tensor([[6e4, -6e4]], dtype=torch.float16))
    assert probabilities.tolist() == [[1.0, 0.0]]
    assert lse.isfinite().all()


@torch.no_grad()
def test_large_scores_keep_their_weights() -> None:
    """A float32 of 1e8 has steps of 8: a rounded log-sum-exp would change all weights of a row."""
    scores = torch.tensor([[1e8, 1e8, 1e8, 1e8 - 8, 0.0]])
    probabilities, _ = softmax(scores)
    torch.testing.assert_close(probabilities, scores.softmax(-1))


def test_recording_collects_in_order_and_ends() -> None:
    assert not recording()
    with recorded() as weights:
        assert recording()
        softmax(torch.zeros(1, 2))
        softmax(torch.zeros(1, 4))
    assert [w.tolist() for w in weights] == [[[0.5, 0.5]], [[0.25] * 4]]
    assert not recording()
    softmax(torch.zeros(1, 2))
    assert len(weights) == 2
