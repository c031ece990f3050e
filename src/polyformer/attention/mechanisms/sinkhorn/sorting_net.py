"""The sorting network: it scores the blocks that may be sorted into the place of each block."""

import math

import torch
from torch import Tensor, nn


class SortingNet(nn.Module):
    """R_i = relu(r_i W_P + b_P) W_B + b_B, with separate parameters per head.

    `count` is the maximum number of blocks of a document.
    """

    def __init__(self, heads: int, width: int, count: int):
        super().__init__()
        deviation = 1 / math.sqrt(width)
        self.hidden = nn.Parameter(torch.empty(heads, width, width).normal_(0.0, deviation))
        self.hidden_bias = nn.Parameter(torch.zeros(heads, width))
        self.scores = nn.Parameter(torch.empty(heads, width, count).normal_(0.0, deviation))
        self.scores_bias = nn.Parameter(torch.zeros(heads, count))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [..., H, N, count] of representations [..., H, N, D]."""
        hidden, scores = self.hidden.to(x.dtype), self.scores.to(x.dtype)
        # [..., H, N, D] @ [H, D, D]: a matrix per head.
        x = torch.relu(x @ hidden + self.hidden_bias.to(x.dtype).unsqueeze(1))
        return x @ scores + self.scores_bias.to(x.dtype).unsqueeze(1)
