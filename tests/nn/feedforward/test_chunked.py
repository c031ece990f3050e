"""Chunks of tokens: the same numbers and gradients, and no inner activations kept."""

import pytest
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.nn.feedforward import ChunkedConfig, DenseConfig, ExpertsConfig, FeedForward, GatedConfig


def results(module: FeedForward) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many numbers were kept for the backward pass."""
    x = torch.linspace(-1, 1, 2 * 11 * 3, dtype=torch.float64).view(2, 11, 3).requires_grad_()
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])], sum(saved.values())


@pytest.mark.parametrize("chunk", [1, 4, 22, 1000])
@pytest.mark.parametrize("inner", [DenseConfig(intermediate_size=40), GatedConfig(intermediate_size=40)])
def test_chunks_change_no_number_and_keep_none(inner: DenseConfig | GatedConfig, chunk: int):
    torch.manual_seed(0)
    whole = inner.build(3).double().train()
    parts = ChunkedConfig(inner=inner, chunk=chunk).build(3).double().train()
    parts.inner.load_state_dict(whole.state_dict())
    expected, kept = results(whole)
    chunked, fewer = results(parts)
    for actual, wanted in zip(chunked, expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert kept > 22 * 40
    assert fewer <= 2 * 22 * 3, "the input alone"


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match="chunk: expected 1 or more, got 0"):
        ChunkedConfig(chunk=0)
    with pytest.raises(InputError, match="inner: 'experts' reads more than one token; put 'chunked' inside"):
        ChunkedConfig(inner=ExpertsConfig())
    ExpertsConfig(expert=ChunkedConfig())
