"""The convolution beside the first layer: by torch's own, and each document as if it stood alone."""

import pytest
import torch
import torch.nn.functional as F

from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.sequence.context import Context
from polyformer.nn.stack.convolution import Convolution, ConvolutionConfig


def build() -> Convolution:
    torch.manual_seed(0)
    packed = Convolution(ConvolutionConfig(convolution_activation="tanh"), 6, LayerNormConfig(), 0.5)
    return packed.double().eval()


def test_it_is_torchs():
    module = build()
    x, y = torch.randn(2, 2, 7, 6).double()
    weight = torch.stack([tap.weight for tap in module.taps], -1)  # type: ignore[arg-type]
    around = F.conv1d(x.mT, weight, module.taps[1].bias, padding=1).mT  # type: ignore[arg-type]
    torch.testing.assert_close(
        module(x, y, Context(7, 7)), module.norm(y + around.tanh()), rtol=1e-12, atol=1e-12
    )


def test_documents_and_padding_end_it():
    module = build()
    x, y = torch.randn(2, 1, 9, 6).double()
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 3, 3]])
    valid = documents < 3
    context = Context(9, 9, q_doc=documents, kv_doc=documents, kv_valid=valid)
    packed = module(x, y, context)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        alone = module(x[:, start:stop], y[:, start:stop], Context(stop - start, stop - start))
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-12, atol=1e-12)
    padded = module(x, y, Context(9, 9, kv_valid=valid))
    alone = module(x[:, :7], y[:, :7], Context(7, 7))
    torch.testing.assert_close(padded[:, :7], alone, rtol=1e-12, atol=1e-12)


def test_a_decoder_cannot_have_it():
    x = torch.randn(1, 3, 6).double()
    with pytest.raises(InputError, match="convolution"):
        build()(x, x, Context(3, 3, causal=True))
