"""A convolution parallel to the first layer, which adds the neighbours of each token.

    y = norm(layer(x) + act(sum_o x_(t + o) W_o + b))        o from -1 to 1

x is the layer's input; positions beyond the text, padding and other documents count as zeros. W_o: [E, E], so
the cost is three matrix products of E x E per token. The two largest sizes of DeBERTa's second version have
it. It sees the following token, so decoders cannot use it. He et al. 2021, released code.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import activation
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(Config):
    """The configuration of a convolution that is three tokens wide."""

    convolution_activation: str = "gelu"

    def __post_init__(self) -> None:
        activation(self.convolution_activation)


class Convolution(nn.Module):
    """The convolution and the norm of its sum with a layer. `taps`: W_o, with b in the middle tap."""

    def __init__(self, config: ConvolutionConfig, hidden_size: int, norm: NormConfig, dropout: float):
        super().__init__()
        self.taps = nn.ModuleList(Linear(hidden_size, hidden_size, bias=o == 0) for o in (-1, 0, 1))
        self.activation = activation(config.convolution_activation)
        self.norm = norm.build(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor, context: Context) -> Tensor:
        """Return the layer's output y [B, T, E] combined with the neighbours of each token of its input x."""
        if context.causal:
            raise InputError("convolution: it reads the following token; leave it out of a decoder")
        if context.kv_valid is not None:
            x = x.masked_fill(~context.kv_valid.bool().unsqueeze(-1), 0)
        # W_-1, W_0 and W_1, as three matrix products instead of a kernel over time.
        before, here, after = self.taps
        # x_(t-1) and x_(t+1), with zeros beyond the text.
        last, following = F.pad(x, (0, 0, 1, 0))[:, :-1], F.pad(x, (0, 0, 0, 1))[:, 1:]
        # At the border of two packed documents, the neighbour belongs to the other document.
        if context.q_doc is not None:
            edge = (context.q_doc.diff(dim=-1) != 0).unsqueeze(-1)
            last = last.masked_fill(F.pad(edge, (0, 0, 1, 0)), 0)
            following = following.masked_fill(F.pad(edge, (0, 0, 0, 1)), 0)
        y = y + self.activation(self.dropout(before(last) + here(x) + after(following)))
        return normalize(self.norm, y, context.q_valid)
