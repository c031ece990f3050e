"""Feed-forward layers with rounded matrices."""

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.nn.feedforward.feedforward import DenseConfig
from polyformer_lab.layers import RoundedConfig, Rounding, with_rounding


def test_weights_are_rounded_and_the_gradient_is_not():
    weight = torch.tensor([[-3.0, 0.4, 1.6, 2.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    rounded = Rounding(3)(weight)
    assert rounded.tolist() == [[-3.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    (rounded * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_layer_rounds_both_matrices():
    torch.manual_seed(0)
    dense = DenseConfig(intermediate_size=16).build(8)
    layer = RoundedConfig(intermediate_size=16, bits=2).build(8)
    layer.load_state_dict(
        {
            name: dense.state_dict()[name.replace("parametrizations.weight.original", "weight")]
            for name in layer.state_dict()
        }
    )
    x = torch.randn(2, 3, 8)
    expected = (x @ Rounding(2)(dense.up.weight).mT + dense.up.bias).relu()
    expected = expected @ Rounding(2)(dense.down.weight).mT + dense.down.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(with_rounding(dense, 2)(x), expected)
    with pytest.raises(InputError, match="bits"):
        RoundedConfig(bits=1)
